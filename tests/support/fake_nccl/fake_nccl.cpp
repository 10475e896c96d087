// SPDX-License-Identifier: BSL-1.0
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/fake_nccl/fake_nccl.hpp>
#include <support/fake_nccl/memory.hpp>

#include <joinable/tensor/dtype.hpp>

namespace fake = joinable_tests::fake_nccl;
namespace fake_cuda = joinable_tests::fake_cuda;

namespace {

using joinable::DType;

enum class Kind { all_reduce, broadcast, reduce, all_gather, reduce_scatter, send, receive };

struct Member;

struct Op {
    Kind kind;
    void const* in;
    void* out;
    std::size_t count;
    ncclDataType_t type;
    ncclRedOp_t op;
    int peer; ///< the root, or the other side
    std::shared_ptr<Member> member;
    cudaStream_t stream;
    double factor = 1.0;          ///< of this rank's input
    bool is_scaled = false;       ///< a sum of scaled inputs is another kernel than a sum
    void const* scalar = nullptr; ///< where the factor is read when the kernel runs
    std::size_t capture = 0;      ///< of a graph: which of the rank's captured operations; else 0

    [[nodiscard]] bool is_message() const { return kind == Kind::send || kind == Kind::receive; }
    [[nodiscard]] bool fits(Op const& other) const {
        return kind == other.kind && count == other.count && type == other.type && op == other.op &&
               peer == other.peer && is_scaled == other.is_scaled && capture == other.capture;
    }
};

/// An operation that is on its stream.
struct Running {
    Op op;
    bool is_done = false;
    bool is_lost = false; ///< its rank has gone
};
using Request = std::shared_ptr<Running>;

/// All ranks of a communicator.
struct World {
    explicit World(int ranks) : size{ranks} {}
    int size;
    std::set<int> joined;
    std::map<std::size_t, std::map<int, Request>> meetings;
    std::map<std::pair<int, int>, std::deque<Request>> sends;
    std::map<std::pair<int, int>, std::deque<Request>> receives;
    std::map<std::size_t, std::map<int, std::pair<int, int>>> splits; ///< colors and keys
    std::map<std::pair<std::size_t, int>, std::shared_ptr<World>> children;
};

/// One rank; outlives its handle where a stream still has operations of it.
struct Member {
    std::shared_ptr<World> world;
    int rank = 0;
    int device = 0;
    bool is_blocking = false;
    bool is_ended = false; ///< aborted or revoked
    bool is_revoked = false;
    bool is_finalized = false;
    ncclResult_t error = ncclSuccess;
    std::string text;
    int polls = 0;
    std::function<bool()> pending; ///< goes on, if it can; whether it is done
    std::size_t collectives = 0;
    std::size_t splits = 0;
    int running = 0; ///< launches on streams
    struct Factor {
        ncclDataType_t type;
        double value;
        void const* scalar; ///< where it is read later; null: now
    };
    std::map<int, Factor> factors;                          ///< of operators that are alive
    int operators = 0;                                      ///< that ever were
    std::size_t captured = 0;                               ///< operations, in graphs
    std::shared_ptr<int> graphs = std::make_shared<int>(0); ///< each node of a graph refers to it
};

} // namespace

/// The header declares it in the global namespace and leaves it to us.
struct ncclComm {
    std::shared_ptr<Member> member;
};

namespace {

// Never destroyed: threads of streams may outlive main().
std::mutex& mutex() {
    static auto* const one = new std::mutex;
    return *one;
}
std::condition_variable& changed() {
    static auto* const one = new std::condition_variable;
    return *one;
}
std::set<ncclComm_t>& live() {
    static auto* const all = new std::set<ncclComm_t>;
    return *all;
}
std::map<std::string, std::shared_ptr<World>>& worlds() { // by unique id, until all have come
    static auto* const all = new std::map<std::string, std::shared_ptr<World>>;
    return *all;
}

std::atomic<int> version{NCCL_VERSION_CODE};
std::atomic<int> polls_in_progress{1};
std::atomic<std::uint64_t> ids{0};

thread_local int depth = 0;
thread_local std::vector<Op> collected;
thread_local ncclResult_t group_error = ncclSuccess;
thread_local std::string last_text;
thread_local std::map<std::string, ncclResult_t> to_fail;
thread_local std::map<std::string, std::size_t> called;

using fake::die;

/// What every function does first. Not success: what it gives instead.
ncclResult_t begin(char const* function) {
    ++called[function];
    if (auto node = to_fail.extract(function); !node.empty()) {
        last_text = std::string{function} + " was told to fail";
        return node.mapped();
    }
    return ncclSuccess;
}
ncclResult_t refuse(ncclResult_t result, std::string text) {
    last_text = std::move(text);
    return result;
}

/// @pre mutex() is locked
Member& member_of(ncclComm_t comm, char const* function) {
    if (!live().contains(comm)) {
        die(std::string{function} + " was given a communicator that is none, or was freed");
    }
    return *comm->member;
}
/// Goes on with what is in progress.
ncclResult_t state_of(Member& member) {
    if (member.error != ncclSuccess) {
        return member.error;
    }
    if (member.pending) {
        if (member.polls > 0) {
            --member.polls;
            return ncclInProgress;
        }
        if (!member.pending()) {
            return member.error == ncclSuccess ? ncclInProgress : member.error;
        }
        member.pending = nullptr;
    }
    return ncclSuccess;
}
/// Whether a call may begin: else the error, which stays.
ncclResult_t ready(Member& member) {
    if (member.is_revoked) {
        return refuse(ncclInvalidUsage, "communicator was revoked");
    }
    if (member.error != ncclSuccess) {
        return refuse(member.error, member.text);
    }
    if (member.pending) {
        member.error = ncclInvalidArgument;
        member.text =
            "Attempt to use communicator before the previous operation returned ncclSuccess";
        return refuse(ncclInvalidArgument, member.text);
    }
    return ncclSuccess;
}
/// Runs `go_on` until it is done: here, or where a non-blocking communicator is asked.
ncclResult_t
start(std::unique_lock<std::mutex>& lock, Member& member, std::function<bool()> go_on) {
    if (!member.is_blocking) {
        member.pending = std::move(go_on);
        member.polls = polls_in_progress;
        return ncclInProgress;
    }
    changed().wait(lock, [&] { return go_on() || member.error != ncclSuccess; });
    return member.error;
}

// -- elements ----------------------------------------------------------------------------------------

DType dtype(ncclDataType_t type) {
    switch (type) {
    case ncclInt8: return DType::i8;
    case ncclUint8: return DType::u8;
    case ncclInt32: return DType::i32;
    case ncclUint32: return DType::u32;
    case ncclInt64: return DType::i64;
    case ncclUint64: return DType::u64;
    case ncclFloat16: return DType::f16;
    case ncclFloat32: return DType::f32;
    case ncclFloat64: return DType::f64;
    case ncclBfloat16: return DType::bf16;
    default: die("an element type that the fake does not have");
    }
}
std::size_t size_of(ncclDataType_t type) {
    return joinable::size_of(dtype(type));
}

template <class T>
T combine(ncclRedOp_t op, T a, T b) {
    if constexpr (std::is_class_v<T>) { // 16 bits compute in float
        return T{combine(op, static_cast<float>(a), static_cast<float>(b))};
    } else {
        switch (op) {
        case ncclSum: return static_cast<T>(a + b);
        case ncclProd: return static_cast<T>(a * b);
        case ncclMin: return b < a ? b : a;
        case ncclMax: return a < b ? b : a;
        default: die("an operation that the fake does not have");
        }
    }
}
template <class T>
T number(double value) {
    if constexpr (std::is_class_v<T>) {
        return T{static_cast<float>(value)};
    } else {
        return static_cast<T>(value);
    }
}
/// The elements from `first` on of all ranks' inputs, in rank order.
std::vector<std::byte> reduced(std::vector<Op> const& ops, std::size_t first, std::size_t count) {
    std::vector<std::byte> result(count * size_of(ops[0].type));
    joinable::visit_dtype(dtype(ops[0].type), [&]<class T>(std::type_identity<T>) {
        // 16 bits add up in float and are rounded once, as where switches add; rings round at each rank.
        using Total = std::conditional_t<std::is_class_v<T>, float, T>;
        auto const input = [&](Op const& op, std::size_t i) {
            T const element = static_cast<T const*>(op.in)[first + i];
            T factor = number<T>(op.factor);
            if (op.scalar != nullptr) {
                std::memcpy(&factor, op.scalar, sizeof(T));
            }
            return static_cast<Total>(op.is_scaled ? combine(ncclProd, element, factor) : element);
        };
        for (std::size_t i = 0; i < count; ++i) {
            Total sum = input(ops[0], i);
            for (std::size_t rank = 1; rank < ops.size(); ++rank) {
                sum = combine(ops[0].op, sum, input(ops[rank], i));
            }
            T const total{sum};
            std::memcpy(result.data() + i * sizeof(T), &total, sizeof(T));
        }
    });
    return result;
}
void write(void* to, std::vector<std::byte> const& bytes) {
    std::memcpy(to, bytes.data(), bytes.size());
}

void run_collective(std::vector<Op> const& ops) {
    Op const& first = ops[0];
    std::size_t const bytes = first.count * size_of(first.type);
    auto const root = static_cast<std::size_t>(first.peer);
    switch (first.kind) {
    case Kind::all_reduce: {
        auto const sum = reduced(ops, 0, first.count);
        for (Op const& op : ops) {
            write(op.out, sum);
        }
        break;
    }
    case Kind::reduce: write(ops[root].out, reduced(ops, 0, first.count)); break;
    case Kind::broadcast:
        for (Op const& op : ops) {
            std::memmove(op.out, ops[root].in, bytes);
        }
        break;
    case Kind::all_gather:
        for (Op const& op : ops) {
            for (std::size_t rank = 0; rank < ops.size(); ++rank) {
                std::memmove(static_cast<std::byte*>(op.out) + rank * bytes, ops[rank].in, bytes);
            }
        }
        break;
    case Kind::reduce_scatter: {
        std::vector<std::vector<std::byte>> parts; // before any is written: in place is allowed
        for (std::size_t rank = 0; rank < ops.size(); ++rank) {
            parts.push_back(reduced(ops, rank * first.count, first.count));
        }
        for (std::size_t rank = 0; rank < ops.size(); ++rank) {
            write(ops[rank].out, parts[rank]);
        }
        break;
    }
    case Kind::send:
    case Kind::receive: break;
    }
}

// -- what runs on streams ----------------------------------------------------------------------------

void meet(World& world, std::size_t number, int rank, Request const& request) {
    auto& meeting = world.meetings[number];
    meeting[rank] = request;
    if (static_cast<int>(meeting.size()) != world.size) {
        return;
    }
    std::vector<Op> ops;
    for (auto const& [other, running] : meeting) {
        if (running->is_lost || !running->op.fits(request->op)) {
            return; // for ever
        }
        ops.push_back(running->op);
    }
    std::vector<fake::Place> places;
    for (Op const& op : ops) {
        places.push_back({op.member->rank, op.in, op.out});
    }
    fake::check_places(&world, places);
    run_collective(ops);
    for (auto const& [other, running] : meeting) {
        running->is_done = true;
    }
    world.meetings.erase(number);
}
void meet_message(World& world, int rank, Request const& request) {
    bool const sends = request->op.kind == Kind::send;
    std::pair const way{sends ? rank : request->op.peer, sends ? request->op.peer : rank};
    (sends ? world.sends : world.receives)[way].push_back(request);
    auto& from = world.sends[way];
    auto& to = world.receives[way];
    while (!from.empty() && !to.empty()) {
        Running& sent = *from.front();
        Running& received = *to.front();
        if (sent.is_lost || received.is_lost || sent.op.count != received.op.count ||
            sent.op.type != received.op.type) {
            return; // for ever
        }
        std::memmove(received.op.out, sent.op.in, sent.op.count * size_of(sent.op.type));
        sent.is_done = received.is_done = true;
        from.pop_front();
        to.pop_front();
    }
}
/// A kernel: all operations of a launch at once.
void run(Member& member, std::vector<Op> const& ops, std::vector<std::size_t> const& numbers) {
    std::unique_lock lock{mutex()};
    std::vector<Request> requests;
    for (std::size_t k = 0; k < ops.size() && !member.is_ended; ++k) {
        requests.push_back(std::make_shared<Running>(Running{ops[k]}));
        if (ops[k].is_message()) {
            meet_message(*member.world, member.rank, requests.back());
        } else {
            meet(*member.world, numbers[k], member.rank, requests.back());
        }
    }
    changed().notify_all();
    changed().wait(lock, [&] {
        return member.is_ended || std::all_of(requests.begin(), requests.end(), [](auto const& r) {
                   return r->is_done;
               });
    });
    for (auto const& request : requests) {
        request->is_lost = !request->is_done;
    }
    --member.running;
    changed().notify_all();
}
/// @pre mutex() is locked
std::vector<std::size_t> next_numbers(Member& member, std::vector<Op> const& ops) {
    std::vector<std::size_t> numbers;
    for (Op const& op : ops) {
        numbers.push_back(op.is_message() ? 0 : member.collectives++);
    }
    return numbers;
}
/// Where the stream captures, the operations get their numbers at each launch of the graph. A graph
/// of one capture fits only those of the same capture on the other ranks, as NCCL demands.
/// @pre mutex() is locked
bool capture(std::shared_ptr<Member> const& member, std::vector<Op> ops) {
    for (Op& op : ops) {
        op.capture = member->captured + 1;
    }
    auto const has = fake_cuda::capture(ops[0].stream, [member, ops, alive = member->graphs] {
        std::lock_guard const lock{mutex()};
        ++member->running;
        return [member, ops, numbers = next_numbers(*member, ops)] { run(*member, ops, numbers); };
    });
    member->captured += has ? 1 : 0;
    return has;
}
/// @pre mutex() is locked
ncclResult_t launch(std::unique_lock<std::mutex>& lock, std::vector<Op> const& ops) {
    std::shared_ptr<Member> const member = ops[0].member;
    return start(lock, *member, [member, ops] {
        if (capture(member, ops)) {
            return true;
        }
        ++member->running;
        try {
            auto const numbers = next_numbers(*member, ops);
            fake_cuda::enqueue(ops[0].stream, [member, ops, numbers] {
                run(*member, ops, numbers);
            });
        } catch (std::invalid_argument const&) {
            --member->running;
            member->error = ncclUnhandledCudaError;
            member->text = "invalid resource handle";
        }
        return member->error == ncclSuccess;
    });
}
/// NCCL waits for that, without end.
/// @pre mutex() is locked
void require_no_graphs(Member const& member, char const* function) {
    if (member.graphs.use_count() > 1) {
        die(std::string{function} + " was called while a CUDA graph has the communicator's kernels"
        );
    }
}

void check_memory(void const* data, std::size_t bytes, char const* function) {
    if (bytes != 0 && !fake_cuda::is_device_memory(data, bytes)) {
        die(std::string{function} + " was given memory that is not the device's");
    }
}

ncclResult_t collect(Op op, ncclComm_t comm, char const* function) {
    ncclResult_t result = begin(function);
    if (result == ncclSuccess) {
        std::unique_lock lock{mutex()};
        Member& member = member_of(comm, function);
        op.member = comm->member;
        if (op.op >= ncclNumOps) {
            auto const found = member.factors.find(op.op);
            if (found == member.factors.end() || found->second.type != op.type) {
                die(std::string{function} + " was given an operator of another type, or none");
            }
            op.factor = found->second.value;
            op.scalar = found->second.scalar;
            op.is_scaled = true;
            op.op = ncclSum;
        }
        auto const ranks = static_cast<std::size_t>(member.world->size);
        std::size_t const part = op.count * size_of(op.type);
        bool const is_root = op.peer == member.rank;
        bool const reads = op.kind != Kind::receive && (op.kind != Kind::broadcast || is_root);
        bool const writes = op.kind != Kind::send && (op.kind != Kind::reduce || is_root);
        check_memory(
            op.in, reads ? part * (op.kind == Kind::reduce_scatter ? ranks : 1) : 0, function
        );
        check_memory(
            op.out, writes ? part * (op.kind == Kind::all_gather ? ranks : 1) : 0, function
        );
        result = ready(member);
        if (result == ncclSuccess && op.count != 0) {
            if (depth == 0) {
                return launch(lock, {op});
            }
            collected.push_back(std::move(op));
        }
    }
    if (result != ncclSuccess && depth > 0) {
        group_error = result;
    }
    return result;
}

void free_handle(ncclComm_t comm) {
    fake::end_member(comm->member->world.get(), comm->member->rank, comm->member->is_ended);
    live().erase(comm);
    delete comm;
}

} // namespace

// -- what tests see ----------------------------------------------------------------------------------

void fake::fail_async(ncclComm_t comm, ncclResult_t result, std::string text) {
    std::lock_guard const lock{mutex()};
    Member& member = member_of(comm, "fail_async");
    member.error = result;
    member.text = std::move(text);
}
void fake::fail_next(std::string function, ncclResult_t result) {
    to_fail[std::move(function)] = result;
}
void fake::set_polls_in_progress(int polls) {
    polls_in_progress = polls;
}
void fake::set_version(int code) {
    version = code;
}
std::size_t fake::live_communicators() {
    std::lock_guard const lock{mutex()};
    return live().size();
}
void fake::forget_communicators() {
    std::lock_guard const lock{mutex()};
    while (!live().empty()) {
        free_handle(*live().begin());
    }
}
std::size_t fake::calls(std::string const& function) {
    return called[function];
}

// -- what fake_memory.cpp asks for -------------------------------------------------------------------

void fake::die(std::string const& text) {
    std::fprintf(stderr, "fake_nccl: %s\n", text.c_str());
    std::abort();
}
ncclResult_t fake::begin_call(char const* function) {
    return begin(function);
}
ncclResult_t
fake::start_call(ncclComm_t comm, char const* function, std::function<bool(Caller const&)> go_on) {
    std::unique_lock lock{mutex()};
    Member& member = member_of(comm, function);
    if (auto const result = ready(member); result != ncclSuccess) {
        return result;
    }
    Caller const caller{member.world.get(), member.rank, member.world->size, false};
    bool const is_done = go_on(caller); // says that this rank has come
    changed().notify_all();
    return is_done && member.is_blocking
               ? ncclSuccess
               : start(lock, member, [caller, go_on = std::move(go_on), is_done] {
                     return is_done || go_on(caller);
                 });
}
fake::Caller fake::caller(ncclComm_t comm, char const* function) {
    std::lock_guard const lock{mutex()};
    Member& member = member_of(comm, function);
    if (member.pending) {
        die(std::string{function} + " while a call is in progress");
    }
    return {member.world.get(), member.rank, member.world->size, member.running != 0};
}

// -- NCCL --------------------------------------------------------------------------------------------

extern "C" {

ncclResult_t ncclGetVersion(int* code) {
    *code = version;
    return begin("ncclGetVersion");
}
char const* ncclGetErrorString(ncclResult_t result) {
    switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error";
    case ncclSystemError: return "unhandled system error";
    case ncclInternalError: return "internal error";
    case ncclInvalidArgument: return "invalid argument";
    case ncclInvalidUsage: return "invalid usage";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
    default: return "unknown result code";
    }
}
char const* ncclGetLastError(ncclComm_t comm) {
    std::lock_guard const lock{mutex()};
    if (comm != nullptr && live().contains(comm) && !comm->member->text.empty()) {
        last_text = comm->member->text;
    }
    return last_text.c_str();
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    if (auto const result = begin("ncclGetUniqueId"); result != ncclSuccess) {
        return result;
    }
    *id = {};
    std::snprintf(id->internal, sizeof id->internal, "fake %d", static_cast<int>(++ids));
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(
    ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config
) {
    if (auto const result = begin("ncclCommInitRankConfig"); result != ncclSuccess) {
        return result;
    }
    std::unique_lock lock{mutex()};
    auto& world = worlds()[id.internal];
    if (!world) {
        world = std::make_shared<World>(ranks);
    }
    if (world->size != ranks || rank < 0 || rank >= ranks || !world->joined.insert(rank).second) {
        return refuse(ncclInvalidArgument, "ranks that do not fit together");
    }
    auto member = std::make_shared<Member>();
    member->world = world;
    member->rank = rank;
    member->is_blocking = config == nullptr || config->blocking != 0; // undefined is blocking
    cudaGetDevice(&member->device);
    *comm = new ncclComm{member};
    live().insert(*comm);
    changed().notify_all();
    return start(lock, *member, [its = std::weak_ptr{member->world}] {
        auto const whole = its.lock();
        return static_cast<int>(whole->joined.size()) == whole->size;
    });
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    if (auto const result = begin("ncclCommFinalize"); result != ncclSuccess) {
        return result;
    }
    std::unique_lock lock{mutex()};
    Member& member = member_of(comm, "ncclCommFinalize");
    if (auto const result = ready(member); result != ncclSuccess) {
        return result;
    }
    member.is_finalized = true;
    return start(lock, member, [&member] { return member.running == 0; });
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    if (auto const result = begin("ncclCommDestroy"); result != ncclSuccess) {
        return result;
    }
    std::unique_lock lock{mutex()};
    Member& member = member_of(comm, "ncclCommDestroy");
    require_no_graphs(member, "ncclCommDestroy");
    changed().wait(lock, [&] { return member.running == 0; }); // for ever, where a rank never comes
    free_handle(comm);
    return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
    ncclResult_t const result = begin("ncclCommAbort");
    if (depth != 0) {
        die("ncclCommAbort was called in an open group, which puts it off");
    }
    std::lock_guard const lock{mutex()};
    Member& member = member_of(comm, "ncclCommAbort");
    require_no_graphs(member, "ncclCommAbort");
    member.is_ended = true;
    member.pending = nullptr;
    changed().notify_all();
    if (result == ncclSuccess) {
        free_handle(comm);
    }
    return result;
}
ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags) {
    if (auto const result = begin("ncclCommRevoke"); result != ncclSuccess) {
        return result;
    }
    std::lock_guard const lock{mutex()};
    Member& member = member_of(comm, "ncclCommRevoke");
    if (flags != 0 || member.is_revoked || member.is_finalized) {
        return refuse(ncclInvalidArgument, "it cannot be revoked");
    }
    member.is_ended = member.is_revoked = true;
    member.pending = nullptr;
    changed().notify_all();
    return ncclSuccess;
}

ncclResult_t
ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* made, ncclConfig_t* config) {
    if (auto const result = begin("ncclCommSplit"); result != ncclSuccess) {
        return result;
    }
    if (depth != 0) {
        die("ncclCommSplit in a group, which the fake does not have");
    }
    std::unique_lock lock{mutex()};
    Member& member = member_of(comm, "ncclCommSplit");
    if (auto const result = ready(member); result != ncclSuccess) {
        return result;
    }
    std::size_t const number = member.splits++;
    member.world->splits[number][member.rank] = {color, key};
    changed().notify_all();
    bool const is_blocking = config == nullptr ? member.is_blocking : config->blocking != 0;
    return start(lock, member, [&member, number, color, made, is_blocking] {
        World& world = *member.world;
        auto const& said = world.splits[number];
        if (static_cast<int>(said.size()) != world.size) {
            return false;
        }
        *made = nullptr;
        if (color == NCCL_SPLIT_NOCOLOR) {
            return true;
        }
        std::vector<std::pair<int, int>> order; // keys and ranks of this color
        for (auto const& [rank, what] : said) {
            if (what.first == color) {
                order.emplace_back(what.second, rank);
            }
        }
        std::sort(order.begin(), order.end());
        auto& child = world.children[{number, color}];
        if (!child) {
            child = std::make_shared<World>(static_cast<int>(order.size()));
        }
        auto part = std::make_shared<Member>();
        part->world = child;
        part->device = member.device;
        part->is_blocking = is_blocking;
        for (std::size_t k = 0; k < order.size(); ++k) {
            part->rank = order[k].second == member.rank ? static_cast<int>(k) : part->rank;
        }
        *made = new ncclComm{part};
        live().insert(*made);
        return true;
    });
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
    if (auto const result = begin("ncclCommGetAsyncError"); result != ncclSuccess) {
        return result;
    }
    std::lock_guard const lock{mutex()};
    *state = state_of(member_of(comm, "ncclCommGetAsyncError"));
    return ncclSuccess;
}
ncclResult_t ncclCommCount(ncclComm_t const comm, int* count) {
    std::lock_guard const lock{mutex()};
    *count = member_of(comm, "ncclCommCount").world->size;
    return begin("ncclCommCount");
}
ncclResult_t ncclCommCuDevice(ncclComm_t const comm, int* device) {
    std::lock_guard const lock{mutex()};
    *device = member_of(comm, "ncclCommCuDevice").device;
    return begin("ncclCommCuDevice");
}
ncclResult_t ncclCommUserRank(ncclComm_t const comm, int* rank) {
    std::lock_guard const lock{mutex()};
    *rank = member_of(comm, "ncclCommUserRank").rank;
    return begin("ncclCommUserRank");
}

ncclResult_t ncclAllReduce(
    void const* in,
    void* out,
    std::size_t count,
    ncclDataType_t type,
    ncclRedOp_t op,
    ncclComm_t comm,
    cudaStream_t stream
) {
    return collect(
        {Kind::all_reduce, in, out, count, type, op, 0, {}, stream}, comm, "ncclAllReduce"
    );
}
ncclResult_t ncclRedOpCreatePreMulSum(
    ncclRedOp_t* op,
    void* scalar,
    ncclDataType_t type,
    ncclScalarResidence_t residence,
    ncclComm_t comm
) {
    ncclResult_t result = begin("ncclRedOpCreatePreMulSum");
    if (result != ncclSuccess) {
        return result;
    }
    std::lock_guard const lock{mutex()};
    Member& member = member_of(comm, "ncclRedOpCreatePreMulSum");
    bool const is_later = residence == ncclScalarDevice;
    if (is_later) {
        check_memory(scalar, size_of(type), "ncclRedOpCreatePreMulSum");
    }
    result = ready(member);
    if (result == ncclSuccess) {
        int const name = static_cast<int>(ncclNumOps) + member.operators++;
        double const factor =
            joinable::visit_dtype(dtype(type), [&]<class T>(std::type_identity<T>) -> double {
                if (is_later) {
                    return 1.0;
                }
                T value;
                std::memcpy(&value, scalar, sizeof(T));
                if constexpr (std::is_class_v<T>) {
                    return static_cast<double>(static_cast<float>(value));
                } else {
                    return static_cast<double>(value);
                }
            });
        member.factors[name] = {type, factor, is_later ? scalar : nullptr};
        *op = static_cast<ncclRedOp_t>(name);
    }
    return result;
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
    std::lock_guard const lock{mutex()};
    if (member_of(comm, "ncclRedOpDestroy").factors.erase(op) == 0) {
        die("ncclRedOpDestroy was given an operator that is none");
    }
    return begin("ncclRedOpDestroy");
}
ncclResult_t ncclReduce(
    void const* in,
    void* out,
    std::size_t count,
    ncclDataType_t type,
    ncclRedOp_t op,
    int root,
    ncclComm_t comm,
    cudaStream_t stream
) {
    return collect({Kind::reduce, in, out, count, type, op, root, {}, stream}, comm, "ncclReduce");
}
ncclResult_t ncclBroadcast(
    void const* in,
    void* out,
    std::size_t count,
    ncclDataType_t type,
    int root,
    ncclComm_t comm,
    cudaStream_t stream
) {
    return collect(
        {Kind::broadcast, in, out, count, type, ncclSum, root, {}, stream}, comm, "ncclBroadcast"
    );
}
ncclResult_t ncclReduceScatter(
    void const* in,
    void* out,
    std::size_t count,
    ncclDataType_t type,
    ncclRedOp_t op,
    ncclComm_t comm,
    cudaStream_t stream
) {
    return collect(
        {Kind::reduce_scatter, in, out, count, type, op, 0, {}, stream}, comm, "ncclReduceScatter"
    );
}
ncclResult_t ncclAllGather(
    void const* in,
    void* out,
    std::size_t count,
    ncclDataType_t type,
    ncclComm_t comm,
    cudaStream_t stream
) {
    return collect(
        {Kind::all_gather, in, out, count, type, ncclSum, 0, {}, stream}, comm, "ncclAllGather"
    );
}
ncclResult_t ncclSend(
    void const* in,
    std::size_t count,
    ncclDataType_t type,
    int peer,
    ncclComm_t comm,
    cudaStream_t stream
) {
    return collect(
        {Kind::send, in, nullptr, count, type, ncclSum, peer, {}, stream}, comm, "ncclSend"
    );
}
ncclResult_t ncclRecv(
    void* out,
    std::size_t count,
    ncclDataType_t type,
    int peer,
    ncclComm_t comm,
    cudaStream_t stream
) {
    return collect(
        {Kind::receive, nullptr, out, count, type, ncclSum, peer, {}, stream}, comm, "ncclRecv"
    );
}

ncclResult_t ncclGroupStart() {
    if (auto const result = begin("ncclGroupStart"); result != ncclSuccess) {
        return result;
    }
    ++depth;
    return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
    if (depth == 0) {
        return refuse(ncclInvalidUsage, "ncclGroupEnd: not in a group call.");
    }
    ncclResult_t result = begin("ncclGroupEnd");
    if (--depth > 0) {
        return result;
    }
    std::vector<Op> ops;
    ops.swap(collected);
    if (auto const error = std::exchange(group_error, ncclSuccess); error != ncclSuccess) {
        return error;
    }
    std::unique_lock lock{mutex()};
    if (result == ncclSuccess && !ops.empty()) {
        if (!std::all_of(ops.begin(), ops.end(), [&](Op const& op) {
                return op.member == ops.front().member;
            })) {
            die("several communicators in a group, which the fake does not have");
        }
        result = launch(lock, ops);
    }
    return result;
}

} // extern "C"
