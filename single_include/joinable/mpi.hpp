// SPDX-License-Identifier: BSL-1.0
#pragma once

// joinable in single headers, for projects that copy files. Generated from include/joinable by
// single_include/amalgamate.py: change the headers there, not this file.

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <climits>
#include <concepts>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <fcntl.h>
#include <functional>
#include <list>
#include <memory>
#include <mpi.h>
#include <mutex>
#include <new>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <sys/mman.h>
#include <sys/stat.h>
#include <thread>
#include <type_traits>
#include <unistd.h>
#include <utility>
#include <vector>

#include "join.hpp"

// ---- joinable/detail/requested_checks.hpp

#ifndef JOINABLE_DETAIL_REQUESTED_CHECKS_HPP_PART_1
#define JOINABLE_DETAIL_REQUESTED_CHECKS_HPP_PART_1

namespace joinable { inline namespace v0 { namespace detail {

/// The checks that the environment variable JOINABLE_CHECK turns on, in programs that are not compiled for them.
struct RequestedChecks {
    std::string_view text; ///< as the variable has it; empty if it is not set
    bool collectives = false;
    bool ready = false;
    bool replicas = false;

    /// @throws ContractViolation  it has an unknown word.
    [[nodiscard]] static RequestedChecks read();
};

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/detail/comparison.hpp

#ifndef JOINABLE_COMMUNICATOR_DETAIL_COMPARISON_HPP_PART_1
#define JOINABLE_COMMUNICATOR_DETAIL_COMPARISON_HPP_PART_1

/// @file
/// How ranks compare what they are about to do.

namespace joinable { inline namespace v0 { namespace detail {

/// Why the signatures differ. `words` has as many words from each rank, in rank order, which begin with its
/// Descriptor::words().
[[nodiscard]] inline std::optional<AbortReason>
difference_of_signatures(int size, std::span<std::uint64_t const> words) {
    std::size_t const width = words.size() / static_cast<std::size_t>(size);
    return find_difference(size, [&](int rank) {
        return Descriptor::of_words(words.subspan(width * static_cast<std::size_t>(rank)));
    });
}

/// Whether ranks must be told the counts of others before they can pass data on.
[[nodiscard]] constexpr bool tells_parts(Descriptor const& signature) noexcept {
    return signature.has_counts && (signature.collective == Collective::gather ||
                                    signature.collective == Collective::scatter ||
                                    signature.collective == Collective::all_to_all);
}

/// The words that ranks sum before data moves: first the signatures, then, if these are equal and have
/// counts, the tables of counts. All find the same difference, or none. Its memory is kept for the next one.
class Comparison {
public:
    /// Begins with the signatures.
    void begin(Descriptor const& own, int rank, int size) {
        signature_ = own;
        rank_ = rank;
        size_ = size;
        has_tables_ = false;
        auto const mine = own.words();
        bool const has_pairs = own.has_counts && own.collective != Collective::gather &&
                               own.collective != Collective::scatter;
        words_.reserve(2 * as_index(size) * (has_pairs ? as_index(size) : 1)); // for go_on(), too
        words_.assign(mine.size() * as_index(size), 0);
        std::copy(mine.begin(), mine.end(), words_.data() + mine.size() * as_index(rank));
    }
    /// Goes on to the tables of the same collective. False if it has none, or they were compared.
    [[nodiscard]] bool go_on(PartSizes const& sends, PartSizes const& expects) {
        if (!signature_.has_counts || std::exchange(has_tables_, true)) {
            return false;
        }
        words_.clear();
        for (int from = 0; from < size_; ++from) {
            for (int to = 0; to < size_; ++to) {
                if (has_part(from, to)) {
                    words_.push_back(from == rank_ ? sends[to] : 0);
                    words_.push_back(to == rank_ ? expects[from] : 0);
                }
            }
        }
        return true;
    }
    /// There is nothing more to compare, until the next begin().
    void end() noexcept { words_.clear(); }
    [[nodiscard]] bool is_over() const noexcept { return words_.empty(); }

    /// To be summed over all ranks, in place.
    [[nodiscard]] std::span<std::uint64_t> words() noexcept { return words_; }
    /// @pre ranks have summed the words
    [[nodiscard]] std::optional<AbortReason> difference() const {
        if (!has_tables_) {
            return difference_of_signatures(size_, words_);
        }
        auto const word = [&](int from, int to, int side) -> std::uint64_t {
            int const pair = signature_.collective == Collective::gather    ? from
                             : signature_.collective == Collective::scatter ? to
                                                                            : size_ * from + to;
            return has_part(from, to) ? words_[static_cast<std::size_t>(2 * pair + side)] : 0;
        };
        return find_difference_of_counts(
            size_,
            signature_,
            [&](int from, int to) { return word(from, to, 0); },
            [&](int from, int to) { return word(from, to, 1); }
        );
    }
    /// The counts of all ranks, as a Substitute takes them. @pre ranks have summed the tables
    [[nodiscard]] std::vector<std::size_t> known() const {
        std::vector<std::size_t> counts;
        for (std::size_t pair = 0; pair < words_.size(); pair += 2) {
            counts.push_back(words_[pair]);
        }
        return counts;
    }

private:
    /// Only the root has parts for others in a scatter, or gets some in a gather.
    [[nodiscard]] bool has_part(int from, int to) const noexcept {
        return signature_.collective == Collective::gather    ? to == signature_.root
               : signature_.collective == Collective::scatter ? from == signature_.root
                                                              : true;
    }

    Descriptor signature_;
    int rank_ = 0;
    int size_ = 0;
    bool has_tables_ = false;
    std::vector<std::uint64_t> words_;
};

/// `words` are an option of all ranks, 0 or 1, by rank. `option` is its name.
/// @throws Mismatch  ranks differ.
inline void check_same_option(
    std::vector<std::uint64_t> const& words, std::string_view option, bool is_renumbered = false
) {
    auto const others = ranks_where(static_cast<int>(words.size()), [&](int rank) {
        return words[as_index(rank)] != words[0];
    });
    if (!others.empty()) {
        throw Mismatch{
            others,
            concat(
                "options differ: ",
                option,
                words[0] != 0 ? ": rank 0 has true, rank " : ": rank 0 has false, rank ",
                others.front(),
                words[0] != 0 ? " has false" : " has true"
            ),
            is_renumbered
        };
    }
}

/// Collective. Whether all ranks compare collectives, because their options say so or JOINABLE_CHECK=collectives
/// does. `option` is the option's name, and `share(word)` returns the words of all ranks, by rank.
/// @throws Mismatch           ranks differ.
/// @throws ContractViolation  the variable has an unknown word; PeerFailed on the others.
template <class Share>
[[nodiscard]] bool agree_to_compare(
    bool by_options, std::string_view option, Share const& share, bool is_renumbered = false
) {
    constexpr std::uint64_t unknown = 2;
    bool compares = by_options;
    std::exception_ptr const error =
        exception_of([&] { compares = compares || RequestedChecks::read().collectives; });
    std::vector<std::uint64_t> words;
    try {
        words = share(error ? unknown : std::uint64_t{compares ? 1U : 0U});
    } catch (...) {
        std::rethrow_exception(error ? error : std::current_exception());
    }
    if (error) {
        std::rethrow_exception(error);
    }
    int const size = static_cast<int>(words.size());
    auto const failed =
        ranks_where(size, [&](int rank) { return words[as_index(rank)] == unknown; });
    if (!failed.empty()) {
        throw PeerFailed{
            failed, failure_text(failed, "JOINABLE_CHECK has an unknown word there"), is_renumbered
        };
    }
    check_same_option(words, concat(option, ", or JOINABLE_CHECK=collectives"), is_renumbered);
    return compares;
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/file_limit.hpp

#ifndef JOINABLE_COMMUNICATOR_FILE_LIMIT_HPP_PART_1
#define JOINABLE_COMMUNICATOR_FILE_LIMIT_HPP_PART_1

#if defined(__linux__)
#include <sys/resource.h>
#endif

namespace joinable { inline namespace v0 { namespace detail {

/// Whether this process may give no file so many bytes: the system would kill it by SIGXFSZ. Other systems than Linux
/// are not asked.
[[nodiscard]] inline bool exceeds_file_limit([[maybe_unused]] std::uint64_t bytes) noexcept {
#if defined(__linux__)
    rlimit limit{};
    return getrlimit(RLIMIT_FSIZE, &limit) == 0 && bytes > limit.rlim_cur;
#else
    return false;
#endif
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/detail/shared_mapping.hpp

#ifndef JOINABLE_COMMUNICATOR_DETAIL_SHARED_MAPPING_HPP_PART_1
#define JOINABLE_COMMUNICATOR_DETAIL_SHARED_MAPPING_HPP_PART_1

namespace joinable { inline namespace v0 { namespace detail {

/// Gives a file this size. Returns 0, or why the system refuses.
[[nodiscard]] inline int resize_file(int file, std::size_t bytes) noexcept {
    if (exceeds_file_limit(bytes)) {
        return EFBIG;
    }
    return ftruncate(file, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
}

/// Maps memory of a file, from an offset on. Without a file, only processes that are created later
/// share the memory. `more` are flags of mmap. If the system refuses, returns an empty arena and sets
/// errno.
[[nodiscard]] inline Arena
map_shared(std::size_t bytes, int file = -1, int more = 0, std::size_t from = 0) noexcept {
    int const kind = MAP_SHARED | (file < 0 ? MAP_ANONYMOUS : 0) | more;
    void* const memory =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, kind, file, static_cast<off_t>(from));
    if (memory == MAP_FAILED) {
        return {};
    }
    auto const unmap = [](void*, std::byte* data, std::size_t size) noexcept {
        munmap(data, size);
    };
    return {static_cast<std::byte*>(memory), bytes, unmap, nullptr};
}

/// An open file, which the destructor closes. Negative: none.
class FileHandle {
public:
    explicit FileHandle(int number) noexcept : number_{number} {}
    ~FileHandle() {
        if (number_ >= 0) {
            close(number_);
        }
    }
    FileHandle(FileHandle&& other) noexcept : number_{std::exchange(other.number_, -1)} {}
    FileHandle& operator=(FileHandle&&) = delete;
    [[nodiscard]] int number() const noexcept { return number_; }

private:
    int number_;
};

/// A new file of this size, without a name. None, and errno, if the system refuses.
[[nodiscard]] inline FileHandle make_file(std::size_t bytes) noexcept {
    FileHandle file{memfd_create("joinable", MFD_CLOEXEC)};
    if (int const error = file.number() < 0 ? errno : resize_file(file.number(), bytes);
        error != 0) {
        errno = error;
        return FileHandle{-1};
    }
    return file;
}

/// A file of which an arena is the mapping. It stays open, so that other processes can get it.
struct SharedFile {
    FileHandle file;
    Arena mapped = {};
    /// To other processes, once SharedBuffer::handle() was called.
    std::shared_ptr<void> offer = {};

    /// If the system refuses, returns an empty arena and sets errno.
    [[nodiscard]] static Arena map(FileHandle file, std::size_t bytes) {
        auto kept = std::make_unique<SharedFile>(SharedFile{std::move(file)});
        kept->mapped = map_shared(bytes, kept->file.number());
        std::byte* const data = kept->mapped.data();
        return data == nullptr ? Arena{} : Arena{data, bytes, &release, kept.release()};
    }
    /// Null if the arena has another kind of memory.
    [[nodiscard]] static SharedFile* of(Arena const& arena) noexcept {
        return static_cast<SharedFile*>(arena.context_of(&release));
    }

private:
    static void release(void* context, std::byte*, std::size_t) noexcept {
        delete static_cast<SharedFile*>(context);
    }
};

/// Memory that the processes of all ranks map, each at its own address. The system counts its
/// mappings, so killing any process leaves nothing of it. Collective; blocks. Rank 0 makes a file
/// without a name, and the others open it through rank 0's process. A process number may mean
/// another process there, as in another container, so they compare device and inode.
/// @throws Mismatch            see check_same_size.
/// @throws CommunicationError  a rank cannot map it; on all ranks.
template <class Comm>
[[nodiscard]] Arena share_mapping(Comm& comm, std::size_t bytes) {
    std::uint64_t const mine = bytes;
    std::vector<std::uint64_t> all(static_cast<std::size_t>(comm.size()));
    comm.all_gather({&mine, 1, DType::u64}, {all.data(), all.size(), DType::u64}).wait();
    check_same_size(all, is_renumbered_group(comm));
    if (bytes == 0) {
        return {};
    }
    enum Word : std::size_t { error, process, number, device, inode, words };
    auto const identity = [](int file) noexcept {
        struct stat status{};
        fstat(file, &status);
        return std::array{
            static_cast<std::int64_t>(status.st_dev), static_cast<std::int64_t>(status.st_ino)
        };
    };
    bool const is_maker = comm.rank() == 0;
    FileHandle file = is_maker ? make_file(bytes) : FileHandle{-1};
    int const refused = file.number() < 0 ? errno : 0;
    auto const own = identity(file.number());
    std::array<std::int64_t, words> maker{refused, getpid(), file.number(), own[0], own[1]};
    comm.broadcast({maker.data(), maker.size(), DType::i64}, 0).wait();

    Arena memory;
    auto failure = static_cast<std::int32_t>(maker[error]);
    if (failure == 0) {
        std::string const path = concat("/proc/", maker[process], "/fd/", maker[number]);
        FileHandle opened{
            is_maker ? -1 : open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK)
        };
        FileHandle& own_view = is_maker ? file : opened;
        if (own_view.number() < 0) {
            failure = errno;
        } else if (identity(own_view.number()) != std::array{maker[device], maker[inode]}) {
            failure = ESTALE;
        } else {
            memory = SharedFile::map(std::move(own_view), bytes);
            failure = memory.data() != nullptr ? 0 : errno;
        }
    }
    comm.all_reduce({&failure, 1, DType::i32}, ReduceOp::max).wait();
    if (failure != 0) {
        throw CommunicationError{concat(
            "expected ",
            bytes,
            " bytes of memory that all ranks share, but on one of them ",
            failure == ESTALE ? "rank 0's process number is another process"
                              : concat("the system says: ", std::strerror(failure)),
            "; ranks need memfd_create() and each other's /proc/<process>/fd, and so one machine, "
            "one user and one namespace of processes"
        )};
    }
    return memory;
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/detail/polling.hpp

#ifndef JOINABLE_COMMUNICATOR_DETAIL_POLLING_HPP_PART_1
#define JOINABLE_COMMUNICATOR_DETAIL_POLLING_HPP_PART_1

namespace joinable { inline namespace v0 { namespace detail {

/// A pause between two polls of a wait. There is none at first, as long as `spins` says. Then the
/// wait yields, because others may need this core. After 10 ms it sleeps.
class PollPause {
public:
    explicit PollPause(std::chrono::nanoseconds spins) noexcept : spins_{spins} {}

    void operator()() {
        auto const now = std::chrono::steady_clock::now();
        if (began_at_ == std::chrono::steady_clock::time_point{}) {
            began_at_ = now;
        }
        if (now - began_at_ >= std::chrono::milliseconds{10}) {
            std::this_thread::sleep_for(std::chrono::microseconds{50});
        } else if (now - began_at_ >= spins_) {
            std::this_thread::yield();
        }
    }

private:
    std::chrono::nanoseconds spins_;
    std::chrono::steady_clock::time_point began_at_{};
};

/// How a caller proceeds with operations in flight.
enum class Waiting : std::uint8_t {
    blocks,
    tests, ///< ends by the deadline
    polls, ///< like tests, without a deadline
};

/// Whether `work` is complete, or there is none. Complete work is destroyed.
template <Work W>
[[nodiscard]] bool is_complete(std::optional<W>& work, Waiting waiting) {
    if (!work) {
        return true;
    }
    if (waiting == Waiting::blocks) {
        work->wait();
    } else if (waiting == Waiting::tests ? !work->test() : !make_progress(*work)) {
        return false;
    }
    work.reset();
    return true;
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/reduction/reduce.hpp

#ifndef JOINABLE_REDUCTION_REDUCE_HPP_PART_1
#define JOINABLE_REDUCTION_REDUCE_HPP_PART_1

namespace joinable { inline namespace v0 { namespace detail {

/// A function from an index to a value, or none. Refers to the given function.
template <class T>
class Numbered {
public:
    Numbered() = default;
    template <class Function>
    Numbered(std::size_t number, Function const& function) noexcept
        : size_{number}, function_{&function}, call_{[](void const* called, std::size_t i) {
              return (*static_cast<Function const*>(called))(i);
          }} {}

    [[nodiscard]] std::size_t size() const noexcept { return size_; }
    [[nodiscard]] T operator[](std::size_t i) const { return call_(function_, i); }

private:
    std::size_t size_ = 0;
    void const* function_ = nullptr;
    T (*call_)(void const*, std::size_t) = nullptr;
};
/// The addresses of all ranks' inputs, or of the outputs.
using Places = Numbered<std::byte*>;
/// The factors by which inputs are multiplied before they are added. May be empty.
using Factors = Numbered<double>;

/// Combines `count` elements of all inputs in rank order and writes them to every output. The bits
/// do not depend on which rank computes them or on how the work was divided. There is at least one
/// input and one output, and is_reducible(dtype, op). An output may be one of the inputs; otherwise they do not overlap. With
/// factors it is a sum of floating-point or complex numbers, each multiplied and rounded first. 16-bit numbers
/// are multiplied as floats.
void reduce_to(
    DType dtype,
    ReduceOp op,
    Places const& inputs,
    Places const& outputs,
    std::size_t count,
    Factors const& factors = {},
    InstructionSet set = instruction_set()
);

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/mpi/detail/api.hpp

/// @file
/// Maps datatypes, operations and errors to those of MPI.

namespace joinable { inline namespace v0 { namespace detail {

[[nodiscard]] inline std::string mpi_text(int code) {
    std::array<char, MPI_MAX_ERROR_STRING> text{};
    int length = 0;
    if (MPI_Error_string(code, text.data(), &length) != MPI_SUCCESS) {
        return concat("error ", code);
    }
    return {text.data(), static_cast<std::size_t>(length)};
}

/// @throws CommunicationError  `code` is an error; with MPI's text.
inline void check_mpi(int code, std::string_view call) {
    if (code != MPI_SUCCESS) {
        throw CommunicationError{concat(call, " failed: ", mpi_text(code))};
    }
}

[[nodiscard]] inline bool is_mpi_running() noexcept {
    int is_initialized = 0;
    int is_finalized = 0;
    static_cast<void>(MPI_Initialized(&is_initialized));
    static_cast<void>(MPI_Finalized(&is_finalized));
    return is_initialized != 0 && is_finalized == 0;
}

/// 16-bit numbers travel as integers, which only our own operators combine.
[[nodiscard]] inline MPI_Datatype mpi_type_of(DType dtype) noexcept {
    switch (dtype) {
    case DType::f16:
    case DType::bf16: return MPI_UINT16_T;
    case DType::f32: return MPI_FLOAT;
    case DType::f64: return MPI_DOUBLE;
    case DType::i8: return MPI_INT8_T;
    case DType::u8: return MPI_UINT8_T;
    case DType::i32: return MPI_INT32_T;
    case DType::u32: return MPI_UINT32_T;
    case DType::i64: return MPI_INT64_T;
    case DType::boolean: return MPI_UINT8_T;
    case DType::i16: return MPI_INT16_T;
    case DType::u16: return MPI_UINT16_T;
    case DType::c64: return MPI_C_FLOAT_COMPLEX;
    case DType::c128: return MPI_C_DOUBLE_COMPLEX;
    case DType::u64: break;
    }
    return MPI_UINT64_T;
}

/// The callback with which MPI combines numbers as the library does.
template <DType dtype, ReduceOp op>
void combine(void* in, void* in_out, int* count, MPI_Datatype*) {
    std::array<std::byte*, 2> const inputs{
        static_cast<std::byte*>(in), static_cast<std::byte*>(in_out)
    };
    auto const input = [&](std::size_t i) { return inputs[i]; };
    auto const output = [&](std::size_t) { return inputs[1]; };
    reduce_to(dtype, op, {2, input}, {1, output}, static_cast<std::size_t>(*count));
}

/// Our own operator. It lives until MPI is finalised.
template <DType dtype, ReduceOp op>
[[nodiscard]] MPI_Op own_operator() {
    static MPI_Op const made = [] {
        MPI_Op created = MPI_OP_NULL;
        check_mpi(MPI_Op_create(&combine<dtype, op>, 1, &created), "MPI_Op_create");
        return created;
    }();
    return made;
}
/// MPI's operator, or ours where MPI's does not combine numbers as the library does: 16-bit numbers are
/// computed in f32, each combination rounded, a product of complex numbers fuses nothing, MPICH 4.0 orders unsigned numbers as if they were signed, and a
/// NaN among floating-point numbers may end on some ranks only, or nowhere.
template <class T, ReduceOp op>
[[nodiscard]] MPI_Op operator_of([[maybe_unused]] MPI_Op standard) {
    constexpr bool orders = op == ReduceOp::min || op == ReduceOp::max;
    constexpr bool multiplies_complex = op == ReduceOp::product && complex_number<T>;
    if constexpr (!is_reducible(dtype_of<T>, op)) {
        return MPI_OP_NULL;
    } else if constexpr (is_half_precision(dtype_of<T>) || multiplies_complex ||
                         (orders && !std::signed_integral<T>)) {
        return own_operator<dtype_of<T>, op>();
    } else {
        return standard;
    }
}

/// @pre is_reducible(dtype, op)
[[nodiscard]] inline MPI_Op mpi_op_of(DType dtype, ReduceOp op) {
    return visit_dtype(dtype, [&]<class T>(std::type_identity<T>) -> MPI_Op {
        switch (op) {
        case ReduceOp::sum: return operator_of<T, ReduceOp::sum>(MPI_SUM);
        case ReduceOp::product: return operator_of<T, ReduceOp::product>(MPI_PROD);
        case ReduceOp::min: return operator_of<T, ReduceOp::min>(MPI_MIN);
        case ReduceOp::max: return operator_of<T, ReduceOp::max>(MPI_MAX);
        case ReduceOp::bit_and: return MPI_BAND; // integers only
        case ReduceOp::bit_or: break;
        }
        return MPI_BOR;
    });
}

/// The limits of one MPI call: elements in a count, and bytes in a displacement. Tests lower them.
struct MpiLimits {
    std::size_t most = INT_MAX;
};

/// An MPI type for `count` elements that start at byte `at_bytes` of a buffer, for when one of the
/// two does not fit into an int. The caller frees it.
[[nodiscard]] inline MPI_Datatype
type_of_part(DType dtype, std::size_t count, std::size_t at_bytes, std::size_t most) {
    MPI_Datatype const element = mpi_type_of(dtype);
    MPI_Datatype chunk = MPI_DATATYPE_NULL;
    check_mpi(MPI_Type_contiguous(static_cast<int>(most), element, &chunk), "MPI_Type_contiguous");
    std::array<int, 2> const lengths{
        static_cast<int>(count / most), static_cast<int>(count % most)
    };
    std::array<MPI_Aint, 2> const places{
        static_cast<MPI_Aint>(at_bytes),
        static_cast<MPI_Aint>(at_bytes + count / most * most * size_of(dtype))
    };
    std::array<MPI_Datatype, 2> const types{chunk, element};
    MPI_Datatype made = MPI_DATATYPE_NULL;
    int const code = MPI_Type_create_struct(2, lengths.data(), places.data(), types.data(), &made);
    static_cast<void>(MPI_Type_free(&chunk)); // the made type keeps it
    check_mpi(code, "MPI_Type_create_struct");
    if (int const committed = MPI_Type_commit(&made); committed != MPI_SUCCESS) {
        static_cast<void>(MPI_Type_free(&made));
        check_mpi(committed, "MPI_Type_commit");
    }
    return made;
}

/// In the first millisecond there is no pause: each poll moves data, and MPI itself yields if it
/// knows that ranks share cores.
struct MpiPause : PollPause {
    MpiPause() noexcept : PollPause{std::chrono::milliseconds{1}} {}
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/mpi/detail/calls.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// Whether the result replaces the input.
[[nodiscard]] inline bool is_one_buffer(Collective collective) noexcept {
    return collective == Collective::all_reduce || collective == Collective::scaled_all_reduce ||
           collective == Collective::reduce || collective == Collective::broadcast;
}
/// Whether ranks pass parts to each other.
[[nodiscard]] inline bool has_parts(Collective collective) noexcept {
    return !is_one_buffer(collective) && collective != Collective::barrier;
}

/// A collective as MPI runs it. Buffers and tables stay valid until it is complete. `in` is either
/// `out` or does not overlap it.
struct MpiTransfer {
    Descriptor signature; ///< its dtype is the one that is sent
    std::byte const* in = nullptr;
    std::byte* out = nullptr;
    PartSizes sends = {};
    PartSizes expects = {};
};

/// The tables that MPI reads until a collective is complete. Their memory is reused.
struct MpiTables {
    std::vector<MPI_Request> requests;
    std::vector<int> counts;
    std::vector<int> places;
    std::vector<MPI_Datatype> types;
    std::vector<MPI_Datatype> made; ///< those of `types` that must be freed

    /// After that the tables get so many elements without allocating.
    void reserve(std::size_t most_requests, std::size_t most_parts, std::size_t most_made) {
        requests.reserve(most_requests);
        counts.reserve(most_parts);
        places.reserve(most_parts);
        types.reserve(most_parts);
        made.reserve(most_made);
    }
    void clear() noexcept {
        for (MPI_Datatype& type : made) {
            static_cast<void>(MPI_Type_free(&type));
        }
        made.clear();
        requests.clear();
    }
};

[[nodiscard]] inline bool has_ended(MpiTables& tables) {
    int is_done = 0;
    check_mpi(
        MPI_Testall(
            static_cast<int>(tables.requests.size()),
            tables.requests.data(),
            &is_done,
            MPI_STATUSES_IGNORE
        ),
        "MPI_Testall"
    );
    return is_done != 0;
}

/// Starts MPI collectives. All ranks start the same ones in the same order, so decisions by size
/// use only sizes that all ranks know.
class MpiCalls {
public:
    MpiCalls(MPI_Comm comm, int rank, int size, MpiLimits limits)
        : comm_{comm}, rank_{rank}, size_{size}, most_{limits.most} {}

    /// Reserves all that start() needs, and one request for a comparison before it.
    void reserve(MpiTransfer const& transfer, MpiTables& tables) const {
        std::size_t requests = 1 + transfer.signature.count / most_;
        std::size_t parts = 0;
        if (has_parts(transfer.signature.collective)) {
            parts = 2 * static_cast<std::size_t>(size_); // sent and received ones
            for (int rank = 0; rank < size_; ++rank) {
                requests += 1 + transfer.sends[rank] / most_;
            }
        }
        tables.reserve(requests, parts, parts);
    }
    void start(MpiTransfer const& transfer, MpiTables& tables) const {
        switch (transfer.signature.collective) {
        case Collective::all_reduce:
        case Collective::scaled_all_reduce: all_reduce(transfer, tables); break;
        case Collective::broadcast: broadcast(transfer, tables); break;
        case Collective::barrier:
            check_mpi(MPI_Ibarrier(comm_, &add_to(tables)), "MPI_Ibarrier");
            break;
        case Collective::reduce: reduce(transfer, tables); break;
        case Collective::reduce_scatter:
        case Collective::scaled_reduce_scatter: reduce_scatter(transfer, tables); break;
        default:
            if (has_equal_parts(transfer)) {
                exchange_equal(transfer, tables);
            } else if (!gather_by_counts(transfer, tables)) {
                exchange(transfer, tables);
            }
        }
    }

private:
    [[nodiscard]] static MPI_Request& add_to(MpiTables& tables) {
        return tables.requests.emplace_back(MPI_REQUEST_NULL);
    }
    /// Calls f(at, count) for pieces of `count` elements that MPI accepts; once if there are none.
    template <class F>
    void in_pieces(std::size_t count, F const& f) const {
        std::size_t at = 0;
        do {
            std::size_t const piece = (std::min)(most_, count - at);
            f(at, static_cast<int>(piece));
            at += piece;
        } while (at < count);
    }
    [[nodiscard]] static void const*
    or_in_place(MpiTransfer const& transfer, std::size_t at_bytes) {
        return transfer.in == transfer.out ? MPI_IN_PLACE
                                           : static_cast<void const*>(transfer.in + at_bytes);
    }

    void all_reduce(MpiTransfer const& transfer, MpiTables& tables) const {
        auto const& signature = transfer.signature;
        in_pieces(signature.count, [&](std::size_t at, int count) {
            std::size_t const at_bytes = at * size_of(signature.dtype);
            check_mpi(
                MPI_Iallreduce(
                    or_in_place(transfer, at_bytes),
                    transfer.out + at_bytes,
                    count,
                    mpi_type_of(signature.dtype),
                    mpi_op_of(signature.dtype, signature.op),
                    comm_,
                    &add_to(tables)
                ),
                "MPI_Iallreduce"
            );
        });
    }
    void reduce(MpiTransfer const& transfer, MpiTables& tables) const {
        auto const& signature = transfer.signature;
        in_pieces(signature.count, [&](std::size_t at, int count) {
            std::size_t const at_bytes = at * size_of(signature.dtype);
            reduce_piece(
                rank_ == signature.root ? or_in_place(transfer, at_bytes) : transfer.in + at_bytes,
                rank_ == signature.root ? transfer.out + at_bytes : nullptr,
                count,
                signature,
                signature.root,
                tables
            );
        });
    }
    void reduce_piece(
        void const* in,
        void* out,
        int count,
        Descriptor const& signature,
        int root,
        MpiTables& tables
    ) const {
        check_mpi(
            MPI_Ireduce(
                in,
                out,
                count,
                mpi_type_of(signature.dtype),
                mpi_op_of(signature.dtype, signature.op),
                root,
                comm_,
                &add_to(tables)
            ),
            "MPI_Ireduce"
        );
    }
    void broadcast(MpiTransfer const& transfer, MpiTables& tables) const {
        auto const& signature = transfer.signature;
        in_pieces(signature.count, [&](std::size_t at, int count) {
            check_mpi(
                MPI_Ibcast(
                    transfer.out + at * size_of(signature.dtype),
                    count,
                    mpi_type_of(signature.dtype),
                    signature.root,
                    comm_,
                    &add_to(tables)
                ),
                "MPI_Ibcast"
            );
        });
    }

    /// Every rank knows all parts: they are in `sends`.
    void reduce_scatter(MpiTransfer const& transfer, MpiTables& tables) const {
        auto const& signature = transfer.signature;
        std::size_t total = 0;
        for (int rank = 0; rank < size_; ++rank) {
            total += transfer.sends[rank];
        }
        if (total > most_) { // one reduction per rank, for its part
            std::size_t at_bytes = 0;
            for (int rank = 0; rank < size_; ++rank) {
                in_pieces(transfer.sends[rank], [&](std::size_t at, int count) {
                    std::size_t const bytes = at * size_of(signature.dtype);
                    reduce_piece(
                        transfer.in + at_bytes + bytes,
                        rank == rank_ ? transfer.out + bytes : nullptr,
                        count,
                        signature,
                        rank,
                        tables
                    );
                });
                at_bytes += transfer.sends[rank] * size_of(signature.dtype);
            }
            return;
        }
        tables.counts.resize(static_cast<std::size_t>(size_));
        for (int rank = 0; rank < size_; ++rank) {
            tables.counts[static_cast<std::size_t>(rank)] = static_cast<int>(transfer.sends[rank]);
        }
        check_mpi(
            MPI_Ireduce_scatter(
                transfer.in,
                transfer.out,
                tables.counts.data(),
                mpi_type_of(signature.dtype),
                mpi_op_of(signature.dtype, signature.op),
                comm_,
                &add_to(tables)
            ),
            "MPI_Ireduce_scatter"
        );
    }

    [[nodiscard]] bool has_equal_parts(MpiTransfer const& transfer) const noexcept {
        return !transfer.signature.has_counts &&
               transfer.signature.count <= most_ / static_cast<std::size_t>(size_);
    }
    void exchange_equal(MpiTransfer const& transfer, MpiTables& tables) const {
        auto const& signature = transfer.signature;
        int const count = static_cast<int>(signature.count);
        MPI_Datatype const type = mpi_type_of(signature.dtype);
        void const* const in = transfer.in;
        void* const out = transfer.out;
        MPI_Request* const request = &add_to(tables);
        switch (signature.collective) {
        case Collective::all_gather:
            check_mpi(
                MPI_Iallgather(in, count, type, out, count, type, comm_, request), "MPI_Iallgather"
            );
            break;
        case Collective::gather:
            check_mpi(
                MPI_Igather(in, count, type, out, count, type, signature.root, comm_, request),
                "MPI_Igather"
            );
            break;
        case Collective::scatter:
            check_mpi(
                MPI_Iscatter(in, count, type, out, count, type, signature.root, comm_, request),
                "MPI_Iscatter"
            );
            break;
        default:
            check_mpi(
                MPI_Ialltoall(in, count, type, out, count, type, comm_, request), "MPI_Ialltoall"
            );
        }
    }

    /// Only all_gather with counts has all counts on all ranks.
    [[nodiscard]] bool gather_by_counts(MpiTransfer const& transfer, MpiTables& tables) const {
        auto const& signature = transfer.signature;
        if (signature.collective != Collective::all_gather) {
            return false;
        }
        tables.counts.clear();
        tables.places.clear();
        std::size_t total = 0;
        for (int rank = 0; rank < size_; ++rank) {
            std::size_t const part = transfer.expects[rank];
            tables.counts.push_back(static_cast<int>(part));
            tables.places.push_back(static_cast<int>(total));
            total += part;
            if (total > most_) {
                return false;
            }
        }
        MPI_Datatype const type = mpi_type_of(signature.dtype);
        check_mpi(
            MPI_Iallgatherv(
                transfer.in,
                tables.counts[static_cast<std::size_t>(rank_)],
                type,
                transfer.out,
                tables.counts.data(),
                tables.places.data(),
                type,
                comm_,
                &add_to(tables)
            ),
            "MPI_Iallgatherv"
        );
        return true;
    }

    /// For parts of any sizes: each rank describes its own with derived types.
    void exchange(MpiTransfer const& transfer, MpiTables& tables) const {
        auto const ranks = static_cast<std::size_t>(size_);
        std::size_t const element = size_of(transfer.signature.dtype);
        bool const sends_one_part = transfer.signature.collective == Collective::all_gather ||
                                    transfer.signature.collective == Collective::gather;
        tables.counts.assign(2 * ranks, 0);
        tables.places.assign(2 * ranks, 0);
        tables.types.assign(2 * ranks, MPI_BYTE);
        std::size_t in_at = 0;
        std::size_t out_at = 0;
        for (std::size_t rank = 0; rank < ranks; ++rank) {
            std::size_t const sent = transfer.sends[static_cast<int>(rank)];
            std::size_t const expected = transfer.expects[static_cast<int>(rank)];
            describe(transfer.signature.dtype, sent, in_at, rank, tables);
            describe(transfer.signature.dtype, expected, out_at, ranks + rank, tables);
            in_at += sends_one_part ? 0 : sent * element;
            out_at += expected * element;
        }
        std::byte nothing[2]{}; // MPI needs two distinct buffers, even for nothing
        check_mpi(
            MPI_Ialltoallw(
                transfer.in == nullptr ? &nothing[0] : transfer.in,
                tables.counts.data(),
                tables.places.data(),
                tables.types.data(),
                transfer.out == nullptr ? &nothing[1] : transfer.out,
                tables.counts.data() + ranks,
                tables.places.data() + ranks,
                tables.types.data() + ranks,
                comm_,
                &add_to(tables)
            ),
            "MPI_Ialltoallw"
        );
    }
    void describe(
        DType dtype, std::size_t count, std::size_t at_bytes, std::size_t index, MpiTables& tables
    ) const {
        if (count == 0) {
            return;
        }
        if (count <= most_ && at_bytes <= most_) {
            tables.counts[index] = static_cast<int>(count);
            tables.places[index] = static_cast<int>(at_bytes);
            tables.types[index] = mpi_type_of(dtype);
        } else {
            tables.counts[index] = 1;
            tables.types[index] =
                tables.made.emplace_back(type_of_part(dtype, count, at_bytes, most_));
        }
    }

    MPI_Comm comm_;
    int rank_;
    int size_;
    std::size_t most_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/mpi/detail/lock.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// Keeps ProgressThreads apart from the one thread that uses a communicator. A communicator shares
/// it with all groups split from it, because a group receives aborts through its parents.
///
/// The rule: what a rank, its memory, its control messages and those of its parents hold is read
/// and changed under this lock alone. The user's thread takes it in each member of MpiCommunicator
/// and MpiWork and when an arena is freed, and holds it to the end of the call, waits included. A
/// ProgressThread takes it for one pass over the operations. No caller's code runs under it, so
/// nobody takes it twice. Only what never changes is read without it: rank, size, options but the
/// deadline, limits, and the handles of MPI. A result is written to the caller's buffer under it,
/// before the operation becomes complete.
///
/// Without a ProgressThread the user's thread locks nothing.
class MpiLock {
public:
    using Held = std::unique_lock<std::mutex>;

    /// For the user's thread. A ProgressThread makes way for it.
    [[nodiscard]] Held take() {
        if (helpers_ == 0) {
            return {};
        }
        ++wanted_; // a mutex alone would let the ProgressThread win again and again
        Held held{mutex_};
        --wanted_;
        return held;
    }
    /// The user's thread has posted something.
    void notify() noexcept {
        if (helpers_ != 0) {
            posted_.notify_all();
        }
    }
    /// The user's thread starts or ends a ProgressThread. @pre that does not run
    void add_helper(int number) noexcept { helpers_ += number; }

    // -- for a ProgressThread ---------------------------------------------------------------------

    [[nodiscard]] Held take_turn() {
        while (wanted_.load() != 0) {
            std::this_thread::yield();
        }
        return Held{mutex_};
    }
    /// Sleeps until something is posted, stop() was called, or the time is over.
    void sleep(Held& held, std::chrono::nanoseconds time) { posted_.wait_for(held, time); }
    /// For the user's thread: `stops` becomes true.
    void stop(bool& stops) {
        {
            Held const held{mutex_};
            stops = true;
        }
        posted_.notify_all();
    }

private:
    std::mutex mutex_;
    std::condition_variable posted_;
    std::atomic<int> wanted_{0};
    int helpers_ = 0; ///< only the user's thread reads and writes it
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/mpi/detail/memory.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The memory of one rank that MPI reads and writes. MPI cannot cancel a collective, so it gets no
/// buffer of the caller, except those in an arena from here.
class MpiMemory {
public:
    explicit MpiMemory(std::shared_ptr<MpiLock> lock) : lock_{std::move(lock)} {}
    MpiMemory(MpiMemory const&) = delete;
    MpiMemory& operator=(MpiMemory const&) = delete;
    ~MpiMemory() {
        for (Blocks const& blocks : blocks_) {
            for (std::byte* const block : blocks.free) {
                ::operator delete(block);
            }
        }
    }

    /// A block for an operation in flight. Blocks are reused, so repeating a size allocates
    /// nothing.
    [[nodiscard]] std::byte* take(std::size_t bytes) {
        auto& [free, count] = blocks_[class_of(bytes)];
        if (free.empty()) {
            free.reserve(count + 1);
            auto* const made =
                static_cast<std::byte*>(::operator new(std::size_t{1} << class_of(bytes)));
            ++count;
            return made;
        }
        std::byte* const block = free.back();
        free.pop_back();
        return block;
    }
    /// `bytes` is the size given to take().
    void give_back(std::byte* block, std::size_t bytes) noexcept {
        blocks_[class_of(bytes)].free.push_back(block); // has room
    }

    /// Whether MPI may use the buffer directly.
    [[nodiscard]] bool has(ConstBuffer buffer) const noexcept {
        auto const* const data = static_cast<std::byte const*>(buffer.data);
        return std::any_of(arenas_.begin(), arenas_.end(), [&](Arena const& arena) {
            return data >= arena.data() && data + buffer.bytes() <= arena.data() + arena.bytes();
        });
    }

    /// From here on nothing is freed, because MPI may still write to it.
    void hold() noexcept { is_held_ = true; }
    /// MPI has finished with the held memory.
    void release() noexcept {
        is_held_ = false;
        held_.clear();
    }

    /// Zeroed memory from the heap. MPI's own allocator would end the job on failure, and its
    /// memory could not be freed once MPI is finalised. The arena may outlive the rank; both share
    /// this object.
    /// @throws std::bad_alloc
    [[nodiscard]] static Arena
    allocate(std::shared_ptr<MpiMemory> const& memory, std::size_t bytes, std::size_t alignment) {
        if (bytes > PTRDIFF_MAX) {
            throw std::bad_alloc{};
        }
        Arena own{bytes, alignment};
        if (bytes == 0) {
            return own;
        }
        auto owner = std::make_unique<std::shared_ptr<MpiMemory>>(memory);
        memory->held_.reserve(memory->held_.size() + memory->arenas_.size() + 1);
        std::byte* const data = own.data();
        memory->arenas_.push_back(std::move(own));
        return Arena{data, bytes, &release, owner.release()};
    }

private:
    /// Those of one size.
    struct Blocks {
        std::vector<std::byte*> free;
        std::size_t count = 0; ///< of all, also of those that are not free
    };

    /// Sizes are rounded up to a power of two, so that a few blocks serve many sizes.
    [[nodiscard]] static std::size_t class_of(std::size_t bytes) noexcept {
        constexpr std::size_t least = 64;
        return static_cast<std::size_t>(std::bit_width((std::max)(bytes, least) - 1));
    }
    static void release(void* context, std::byte* data, std::size_t) noexcept {
        std::unique_ptr<std::shared_ptr<MpiMemory>> const owner{
            static_cast<std::shared_ptr<MpiMemory>*>(context)
        };
        MpiMemory& memory = **owner;
        auto const held = memory.lock_->take();
        auto const found =
            std::find_if(memory.arenas_.begin(), memory.arenas_.end(), [&](Arena const& arena) {
                return arena.data() == data;
            });
        if (memory.is_held_) {
            memory.held_.push_back(std::move(*found)); // it has capacity for all arenas
        }
        memory.arenas_.erase(found);
    }

    std::shared_ptr<MpiLock> lock_; ///< the rank's
    std::array<Blocks, 65> blocks_; ///< by the logarithm of their size
    std::vector<Arena> arenas_;     ///< the memory of the callers' arenas
    std::vector<Arena> held_;       ///< of callers' arenas that were destroyed
    bool is_held_ = false;
};

}}} // namespace joinable::v0::detail

// ---- joinable/reduction/arithmetic.hpp

#ifndef JOINABLE_REDUCTION_ARITHMETIC_HPP_PART_1
#define JOINABLE_REDUCTION_ARITHMETIC_HPP_PART_1

namespace joinable { inline namespace v0 { namespace detail {

template <class T>
concept sixteen_bits = std::same_as<T, Half> || std::same_as<T, BFloat16>;

/// The unsigned integer of a size. Integers are added in it, because it wraps.
template <std::size_t Bytes>
    requires(Bytes == 1 || Bytes == 2 || Bytes == 4 || Bytes == 8)
using bits_of_size = std::conditional_t<
    Bytes <= 2,
    std::conditional_t<Bytes == 1, std::uint8_t, std::uint16_t>,
    std::conditional_t<Bytes == 4, std::uint32_t, std::uint64_t>>;

/// Applies an operation to the halves of two words, and returns a word of the two results.
template <class T, class Operation>
[[gnu::always_inline]] inline std::uint32_t
each_half(Operation const& operation, std::uint32_t source, std::uint32_t target) noexcept {
    using C = Conversion<T>;
    float low = C::widen(target & 0xffffU);
    float high = C::widen(target >> 16);
    operation.compute(C::widen(source & 0xffffU), low);
    operation.compute(C::widen(source >> 16), high);
    return C::narrow(low) | (C::narrow(high) << 16);
}

// An operation on elements. `Element` is the type in memory. `Word` is the type of one computation:
// one element, or two of 16 bits (a single one is then in the low half). The call takes a word of
// the source and the word of the target that it replaces. `compute` does the same to widened 16-bit
// numbers, to one or to a register full.

/// target = source * factor
template <class T>
struct Scale {
    using Element = T;
    using Word = T;
    T factor;

    explicit Scale(double number) noexcept : factor{static_cast<T>(number)} {}
    [[gnu::always_inline]] T operator()(T source, T) const noexcept { return source * factor; }
};

template <sixteen_bits T>
struct Scale<T> {
    using Element = std::uint16_t;
    using Word = std::uint32_t;
    using Number = T;
    float factor;

    explicit Scale(double number) noexcept : factor{static_cast<float>(number)} {}
    template <class Floats>
    [[gnu::always_inline]] void compute(Floats const& source, Floats& target) const noexcept {
        target = source * factor;
    }
    [[gnu::always_inline]] Word operator()(Word source, Word) const noexcept {
        return each_half<T>(*this, source, 0);
    }
};

/// target = target + source
template <class T>
struct Add {
    using Element = T;
    using Word = T;

    [[gnu::always_inline]] T operator()(T source, T target) const noexcept {
        return static_cast<T>(target + source);
    }
};

template <sixteen_bits T>
struct Add<T> {
    using Element = std::uint16_t;
    using Word = std::uint32_t;
    using Number = T;

    template <class Floats>
    [[gnu::always_inline]] void compute(Floats const& source, Floats& target) const noexcept {
        target = target + source;
    }
    [[gnu::always_inline]] Word operator()(Word source, Word target) const noexcept {
        return each_half<T>(*this, source, target);
    }
};

/// target = source; only the bits matter.
template <class Bits>
struct Assign {
    using Element = Bits;
    using Word = Bits;

    [[gnu::always_inline]] Bits operator()(Bits source, Bits) const noexcept { return source; }
};

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/reduction/rows.hpp

#ifndef JOINABLE_REDUCTION_ROWS_HPP_PART_1
#define JOINABLE_REDUCTION_ROWS_HPP_PART_1

namespace joinable { inline namespace v0 { namespace detail {

/// Rows of elements at equal distances, in bytes.
template <class Byte>
struct Rows {
    Byte* data;
    std::size_t step;     ///< from element to element
    std::size_t next = 0; ///< from row to row
};

/// Memory is read and written as bytes, so no engine's element type can alias.
template <class T>
[[gnu::always_inline]] inline T load(std::byte const* from) noexcept {
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
}
template <class T>
[[gnu::always_inline]] inline void store(std::byte* to, T value) noexcept {
    std::memcpy(to, &value, sizeof(T));
}

/// Writes a register past the caches, to a multiple of 16 bytes, if the processor can. Other
/// threads see the data after `finish_streams()`.
using Bytes16 [[gnu::vector_size(16)]] = unsigned char;
template <class Register>
[[gnu::always_inline]] inline void stream(std::byte* to, Register const& value) noexcept {
    if constexpr (has_streaming_stores) {
        std::array<Bytes16, sizeof(Register) / 16> pieces;
        std::memcpy(&pieces, &value, sizeof(Register));
        for (Bytes16 const& piece : pieces) {
            asm volatile("movntdq %1, %0" : "=m"(*reinterpret_cast<Bytes16*>(to)) : "x"(piece));
            to += sizeof(piece);
        }
    }
}
template <bool exist = has_streaming_stores>
[[gnu::always_inline]] inline void finish_streams() noexcept {
    if constexpr (exist) {
        asm volatile("sfence" : : : "memory");
    }
}

/// The bytes of a register, for loops that need to know.
template <std::size_t bytes>
using Width = std::integral_constant<std::size_t, bytes>;

/// A loop over elements, compiled for each instruction set. `Loop::run(width, done, arguments...)` goes
/// from element `done` on, with registers of at most `width` bytes. Where there is AVX2, `done` is what
/// `Loop::convert(arguments...)` has done before, because only a function for AVX2 can inline its
/// conversions.
template <class Loop, class... Arguments>
struct CompiledLoop {
    JOINABLE_LOOP static void baseline(Arguments... arguments) noexcept {
        Loop::run(Width<16>{}, 0, arguments...);
    }
    JOINABLE_LOOP_AVX2 static void avx2(Arguments... arguments) noexcept {
        Loop::run(Width<32>{}, Loop::convert(arguments...), arguments...);
    }
    JOINABLE_LOOP_AVX512 static void avx512(Arguments... arguments) noexcept {
        Loop::run(Width<64>{}, Loop::convert(arguments...), arguments...);
    }
    /// The function for this processor, or for an instruction set that it has.
    [[nodiscard]] static auto* of(InstructionSet set = instruction_set()) noexcept {
        switch (set) {
        case InstructionSet::avx512: return &avx512;
        case InstructionSet::avx2: return &avx2;
        case InstructionSet::baseline: break;
        }
        return &baseline;
    }
};

/// Rows without gaps, which are the same or do not overlap.
template <class Operation>
[[gnu::always_inline]] inline void
words(Operation const& operation, std::byte const* from, std::byte* to, std::size_t count) {
    using Word = typename Operation::Word;
    JOINABLE_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) {
        std::size_t const at = i * sizeof(Word);
        store<Word>(to + at, operation(load<Word>(from + at), load<Word>(to + at)));
    }
}
template <class Bits>
void words(Assign<Bits> const&, std::byte const* from, std::byte* to, std::size_t count) {
    std::memmove(to, from, count * sizeof(Bits));
}

/// One row, compiled for the caller's instruction set. The rows are the same or do not overlap.
template <class Operation>
[[gnu::always_inline]] inline void apply(
    Operation const operation,
    Rows<std::byte const> const& from,
    Rows<std::byte> const& to,
    std::size_t count
) {
    using Element = typename Operation::Element;
    using Word = typename Operation::Word;
    std::size_t done = 0;
    if (from.step == sizeof(Element) && to.step == sizeof(Element)) {
        std::size_t const whole = count * sizeof(Element) / sizeof(Word);
        words(operation, from.data, to.data, whole);
        done = whole * sizeof(Word) / sizeof(Element);
    }
    for (std::size_t i = done; i < count; ++i) {
        std::byte* const target = to.data + i * to.step;
        Word const result =
            operation(load<Element>(from.data + i * from.step), load<Element>(target));
        store<Element>(target, static_cast<Element>(result));
    }
}

template <class Operation>
concept is_of_halves = std::same_as<typename Operation::Number, Half>;

using RowsFunction =
    void(void const*, Rows<std::byte const>, Rows<std::byte>, std::size_t, std::size_t) noexcept;
template <class Loop>
using RowsLoop = CompiledLoop<
    Loop,
    void const*,
    Rows<std::byte const>,
    Rows<std::byte>,
    std::size_t,
    std::size_t>;

/// Applies the operation at an address to rows: one type of function for all operations.
template <class Operation>
struct ApplyLoop {
    [[gnu::always_inline]] static void
    run([[maybe_unused]] std::size_t width,
        [[maybe_unused]] std::size_t done,
        void const* operation,
        Rows<std::byte const> from,
        Rows<std::byte> to,
        std::size_t count,
        std::size_t rows) {
        if constexpr (has_half_conversions && is_of_halves<Operation>) {
            if (width > 16) { // at most seven are left: compiled once for all instruction sets
                from.data += done * from.step;
                to.data += done * to.step;
                if (done < count) {
                    RowsLoop<ApplyLoop>::baseline(operation, from, to, count - done, rows);
                }
                return;
            }
        }
        for (; rows != 0; --rows, from.data += from.next, to.data += to.next) {
            apply(*static_cast<Operation const*>(operation), from, to, count);
        }
    }
    /// The f16 numbers of each row, as far as the processor converts eight at a time.
    template <bool is_dense = false>
    JOINABLE_INLINE_AVX2 static std::size_t convert(
        void const* operation,
        Rows<std::byte const> from,
        Rows<std::byte> to,
        std::size_t count,
        std::size_t rows
    ) {
        if constexpr (has_half_conversions && is_of_halves<Operation>) {
            if (!is_dense && from.step == sizeof(Half) && to.step == sizeof(Half)) {
                return convert<true>(operation, from, to, count, rows);
            }
            auto const computes = *static_cast<Operation const*>(operation);
            for (; rows != 0; --rows, from.data += from.next, to.data += to.next) {
                for (std::size_t i = 0; i + 8 <= count; i += 8) {
                    std::byte const* const source = from.data + i * from.step;
                    std::byte* const target = to.data + i * to.step;
                    auto a = is_dense ? load<EightHalves>(source) : EightHalves{};
                    auto b = is_dense ? load<EightHalves>(target) : EightHalves{};
                    for (std::size_t k = is_dense ? 8 : 0; k < 8; ++k) {
                        a[k] = load<short>(source + k * from.step);
                        b[k] = load<short>(target + k * to.step);
                    }
                    EightFloats x;
                    EightFloats y;
                    widen(a, x);
                    widen(b, y);
                    computes.compute(x, y);
                    narrow(y, b);
                    if (is_dense) {
                        store(target, b);
                    }
                    for (std::size_t k = is_dense ? 8 : 0; k < 8; ++k) {
                        store<short>(target + k * to.step, b[k]);
                    }
                }
            }
            return count / 8 * 8;
        }
        return 0;
    }
};
template <class Operation>
using ApplyLoops = RowsLoop<ApplyLoop<Operation>>;

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/reduction/halves.hpp

#ifndef JOINABLE_REDUCTION_HALVES_HPP_PART_1
#define JOINABLE_REDUCTION_HALVES_HPP_PART_1

/// @file
/// Converts rows of 16-bit numbers to float and back, with the same bits as Half and BFloat16.
/// Compiled for each instruction set. Rows do not overlap.

namespace joinable { inline namespace v0 { namespace detail {

template <sixteen_bits T>
struct Widen {
    static constexpr std::size_t from_bytes = sizeof(T);
    static constexpr std::size_t to_bytes = sizeof(float);
    static constexpr bool has_instruction = has_half_conversions && std::is_same_v<T, Half>;

    [[gnu::always_inline]] static void one(std::byte const* from, std::byte* to) noexcept {
        store<float>(to, Conversion<T>::widen(load<std::uint16_t>(from)));
    }
    JOINABLE_INLINE_AVX2 static void eight(std::byte const* from, std::byte* to) noexcept {
        EightFloats floats;
        widen(load<EightHalves>(from), floats);
        std::memcpy(to, &floats, sizeof(floats));
    }
};

template <sixteen_bits T>
struct Narrow {
    static constexpr std::size_t from_bytes = sizeof(float);
    static constexpr std::size_t to_bytes = sizeof(T);
    static constexpr bool has_instruction = has_half_conversions && std::is_same_v<T, Half>;

    [[gnu::always_inline]] static void one(std::byte const* from, std::byte* to) noexcept {
        store(to, static_cast<std::uint16_t>(Conversion<T>::narrow(load<float>(from))));
    }
    JOINABLE_INLINE_AVX2 static void eight(std::byte const* from, std::byte* to) noexcept {
        EightFloats floats;
        EightHalves halves;
        std::memcpy(&floats, from, sizeof(floats));
        narrow(floats, halves);
        store(to, halves);
    }
};

/// Converts a row. Uses the processor's instruction, if there is one.
template <class C>
struct ConvertLoop {
    [[gnu::always_inline]] static void
    run(std::size_t /*width*/,
        std::size_t done,
        std::byte const* __restrict from,
        std::byte* __restrict to,
        std::size_t count) noexcept {
        for (std::size_t i = done; i < count; ++i) {
            C::one(from + i * C::from_bytes, to + i * C::to_bytes);
        }
    }
    JOINABLE_INLINE_AVX2 static std::size_t
    convert(std::byte const* from, std::byte* to, std::size_t count) noexcept {
        std::size_t done = 0;
        if constexpr (C::has_instruction) {
            for (; done + 8 <= count; done += 8) {
                C::eight(from + done * C::from_bytes, to + done * C::to_bytes);
            }
        }
        return done;
    }
};
template <class C>
using ConvertLoops = CompiledLoop<ConvertLoop<C>, std::byte const*, std::byte*, std::size_t>;

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/mpi/detail/operation.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// Asks all other ranks what they have posted.
struct MpiQuestion {
    std::uint64_t number = 0; ///< from 1 on; 0: no question
    std::chrono::steady_clock::time_point asked_at{};
};

/// One collective or message of this rank, from its post to its end. The object is reused.
struct MpiOperation {
    enum class State {
        checking, ///< ranks compare it
        under_way,
        complete,
        lost, ///< an abort came first: MPI still has the memory
    };
    static constexpr MPI_Count too_much = -1; ///< as `received`

    /// A block of MpiMemory.
    struct Block {
        std::byte* data = nullptr;
        std::size_t bytes = 0;
    };

    State state = State::under_way;
    MpiTransfer transfer;
    MpiTables tables;
    std::uint64_t number = 0; ///< among this rank's collectives, or messages with its peer
    int peer = -1;            ///< of a message
    bool is_send = false;
    int tag = 0;
    std::optional<MPI_Count> received; ///< bytes, once a receive has ended
    std::string_view called;           ///< in texts, if it is not named as MPI's
    Comparison comparison;
    WaitClock polled;
    MpiQuestion question;    ///< asked at its deadline
    bool is_refused = false; ///< by MPI: its requests must not be tested again
    bool is_stalled = false; ///< all ranks had posted it one deadline ago

    [[nodiscard]] bool is_message() const noexcept { return peer >= 0; }
    [[nodiscard]] bool is_receive() const noexcept { return is_message() && !is_send; }
    /// The caller's request, which must be the same on all ranks.
    [[nodiscard]] Descriptor signature() const noexcept {
        Descriptor asked = transfer.signature;
        asked.dtype = dtype_;
        return asked;
    }
    /// Whether the comparison, if any, is over. This does not change when an abort comes.
    [[nodiscard]] bool moves_data() const noexcept { return comparison.is_over(); }
    [[nodiscard]] std::string text() const {
        if (!called.empty()) {
            return to_text(called);
        }
        if (!is_message()) {
            return signature().text();
        }
        return concat(
            is_send ? "a send to rank " : "a receive from rank ", peer, " with tag ", tag
        );
    }

    /// Takes `memory` for buffers that MPI must not have, and copies the inputs there. `is_wide`:
    /// 16-bit numbers are sent as f32 if they are combined.
    void prepare(Request const& request, MpiMemory& memory, bool is_wide) {
        auto const& [signature, in, out, sends, expects, pieces] = request;
        widens_ = is_wide && is_half_precision(signature.dtype) && signature.is_reduction();
        dtype_ = signature.dtype;
        transfer = {signature, nullptr, nullptr, sends, expects};
        transfer.signature.dtype = widens_ ? DType::f32 : signature.dtype;
        if (signature.has_counts) { // the caller's tables may end
            kept_.keep(transfer.sends, transfer.expects, ranks);
        }
        bool const is_one = is_one_buffer(signature.collective) && in.data == out.data;
        // If one buffer is a part of the other, MPI does not get the smaller one.
        bool const has_part = !is_one && overlap(in, out);
        bool const keeps_in = !widens_ && memory.has(in) &&
                              (is_one || !is_scaled(signature.collective)) &&
                              !(has_part && in.count <= out.count);
        bool const keeps_out = !widens_ && memory.has(out) && !(has_part && out.count < in.count);
        if (out.count != 0) {
            transfer.out =
                keeps_out ? static_cast<std::byte*>(out.data) : take(memory, out_, out.count);
        }
        if (in.count != 0) {
            if (is_one) {
                fill(in, transfer.out);
                transfer.in = transfer.out;
            } else if (keeps_in) {
                transfer.in = static_cast<std::byte const*>(in.data);
            } else {
                std::byte* const copy = take(memory, in_, in.count);
                fill(in, copy);
                transfer.in = copy;
            }
        }
        bool const is_source = signature.collective == Collective::broadcast && in.count != 0;
        result_ = keeps_out || is_source ? Buffer{} : out;
    }
    /// The same for a message.
    void prepare_message(Buffer buffer, MpiMemory& memory) {
        transfer = {};
        transfer.signature.dtype = buffer.dtype;
        transfer.signature.count = buffer.count;
        widens_ = false;
        bool const keeps = memory.has(buffer);
        transfer.out = keeps || buffer.count == 0 ? static_cast<std::byte*>(buffer.data)
                                                  : take(memory, out_, buffer.count);
        if (is_send && !keeps) {
            fill(buffer, transfer.out);
        }
        result_ = keeps || is_send ? Buffer{} : buffer;
    }
    /// Copies the result to the caller's buffer, and gives back the memory.
    void deliver(MpiMemory& memory) {
        if (result_.count != 0) {
            auto* const to = static_cast<std::byte*>(result_.data);
            if (widens_) {
                convert<Narrow>(result_.dtype, transfer.out, to, result_.count);
            } else {
                std::memcpy(to, transfer.out, result_.bytes());
            }
        }
        give_back(memory);
        state = State::complete;
    }
    /// Gives back the memory. @pre MPI has finished with it
    void give_back(MpiMemory& memory) noexcept {
        tables.clear();
        for (Block* const block : {&in_, &out_}) {
            if (block->data != nullptr) {
                memory.give_back(block->data, block->bytes);
                *block = {};
            }
        }
    }

    int ranks = 0; ///< of the communicator

private:
    [[nodiscard]] std::byte* take(MpiMemory& memory, Block& block, std::size_t count) const {
        std::size_t const bytes = count * size_of(transfer.signature.dtype);
        block = {memory.take(bytes), bytes};
        return block.data;
    }
    /// Copies, applying the factor if there is one. `to` may be the buffer itself.
    void fill(ConstBuffer from, std::byte* to) const {
        if (widens_) {
            convert<Widen>(from.dtype, static_cast<std::byte const*>(from.data), to, from.count);
            from = {to, from.count, DType::f32};
        }
        if (is_scaled(transfer.signature.collective)) {
            auto const view = [&](void const* data) {
                return AnyView{const_cast<void*>(data), from.dtype, {from.count}, {1}};
            };
            scale_copy(view(from.data), transfer.signature.factor, view(to));
        } else if (from.data != to) {
            std::memcpy(to, from.data, from.bytes());
        }
    }
    template <template <class> class Conversion>
    static void convert(DType dtype, std::byte const* from, std::byte* to, std::size_t count) {
        InstructionSet const set = instruction_set();
        auto* const function = dtype == DType::f16 ? ConvertLoops<Conversion<Half>>::of(set)
                                                   : ConvertLoops<Conversion<BFloat16>>::of(set);
        function(from, to, count);
    }

    Block in_;
    Block out_;
    Buffer result_{};         ///< the copy's target; empty: MPI wrote there directly
    DType dtype_ = DType::u8; ///< the caller's dtype
    bool widens_ = false;     ///< it is sent as f32
    KeptTables kept_;         ///< of a collective with counts
};

/// The operations of a rank, which are reused.
class MpiOperations {
public:
    explicit MpiOperations(int ranks) : ranks_{ranks} {}

    [[nodiscard]] MpiOperation& next() {
        if (free_.empty()) {
            free_.reserve(all_.size() + 1);
            all_.push_back(std::make_unique<MpiOperation>());
            all_.back()->ranks = ranks_;
            return *all_.back();
        }
        MpiOperation& operation = *free_.back();
        free_.pop_back();
        operation.called = {};
        operation.comparison.end();
        operation.peer = -1;
        operation.received.reset();
        operation.polled = {};
        operation.question = {};
        operation.is_refused = false;
        operation.is_stalled = false;
        return operation;
    }
    void give_back(MpiOperation& operation) noexcept { free_.push_back(&operation); } // has room

private:
    int ranks_;
    std::vector<std::unique_ptr<MpiOperation>> all_;
    std::vector<MpiOperation*> free_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/mpi/detail/check.hpp

/// @file
/// The optional comparison before data moves, and that before ranks block inside MPI.

namespace joinable { inline namespace v0 { namespace detail {

/// Sums the words that ranks compare.
inline void sum_words(MpiOperation& operation, MPI_Comm comm) {
    std::span<std::uint64_t> const words = operation.comparison.words();
    MPI_Request& request = operation.tables.requests.emplace_back(MPI_REQUEST_NULL);
    check_mpi(
        MPI_Iallreduce(
            MPI_IN_PLACE,
            words.data(),
            static_cast<int>(words.size()),
            MPI_UINT64_T,
            MPI_SUM,
            comm,
            &request
        ),
        "MPI_Iallreduce"
    );
}

/// The reason when ranks did not compare their collectives, all have posted one, and `rank` still
/// waits.
[[nodiscard]] inline AbortReason reason_of_stall(int rank, MpiOperation const& operation) {
    return {
        FailureKind::communication,
        {},
        concat(
            "all ranks have posted a collective, but MPI does not complete it; rank ",
            rank,
            " waits in ",
            operation.text(),
            ": MpiOptions{.check = true} tells whether the others do"
        )
    };
}

/// Why ranks meet before they block inside MPI. No other words have these values by chance.
enum class MpiMeeting : std::uint64_t {
    split = 0x7469'6c70'7326'494d,
    share = 0x6572'6168'7326'494d,
};
[[nodiscard]] constexpr std::string_view name_of(MpiMeeting kind) noexcept {
    return kind == MpiMeeting::split   ? "split"
           : kind == MpiMeeting::share ? "share"
                                       : "another collective";
}
/// `words` has two words from each rank: its MpiMeeting, or a word of another collective, and one
/// more.
[[nodiscard]] inline std::optional<AbortReason>
difference_of_meetings(std::span<std::uint64_t const> words) {
    struct Meeting {
        MpiMeeting word;

        bool operator==(Meeting const&) const = default;
        [[nodiscard]] static bool is_agreement() noexcept { return false; }
        [[nodiscard]] std::string_view text() const noexcept { return name_of(word); }
    };
    return find_difference(static_cast<int>(words.size() / 2), [&](int rank) {
        return Meeting{static_cast<MpiMeeting>(words[2 * static_cast<std::size_t>(rank)])};
    });
}

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/mpi/detail/duplicate.hpp

/// @file
/// Makes MPI communicators from a given one.

namespace joinable { inline namespace v0 { namespace detail {

/// @throws ContractViolation  MPI is not running, or `comm` is not an intracommunicator with at
///                            most as many ranks as a host communicator may have.
inline void check_mpi_communicator(MPI_Comm comm) {
    if (!is_mpi_running()) {
        throw ContractViolation{
            "expected MPI to run, but it is not initialised, or it is finalised already: make the "
            "communicator between MPI_Init and MPI_Finalize"
        };
    }
    int connects_two = 0;
    if (comm == MPI_COMM_NULL || MPI_Comm_test_inter(comm, &connects_two) != MPI_SUCCESS ||
        connects_two != 0) {
        throw ContractViolation{
            "expected the communicator of one group of ranks, but was given MPI_COMM_NULL, or one "
            "that connects two groups"
        };
    }
    int size = 0;
    check_mpi(MPI_Comm_size(comm, &size), "MPI_Comm_size");
    if (size > max_ranks) {
        throw ContractViolation{
            concat("expected at most ", max_ranks, " ranks, but the communicator has ", size)
        };
    }
}

/// While this object lives, MPI returns the errors of `comm`; its duplicates return theirs for
/// ever. By default errors end the job.
class MpiErrorsReturned {
public:
    explicit MpiErrorsReturned(MPI_Comm comm) : comm_{comm} {
        check_mpi(MPI_Comm_get_errhandler(comm, &before_), "MPI_Comm_get_errhandler");
        static_cast<void>(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN));
    }
    ~MpiErrorsReturned() {
        if (!is_kept_) {
            static_cast<void>(MPI_Comm_set_errhandler(comm_, before_));
        }
        static_cast<void>(MPI_Errhandler_free(&before_));
    }
    MpiErrorsReturned(MpiErrorsReturned const&) = delete;
    MpiErrorsReturned& operator=(MpiErrorsReturned const&) = delete;

    /// From here on errors are returned for ever.
    void keep() noexcept { is_kept_ = true; }

private:
    MPI_Comm comm_;
    MPI_Errhandler before_ = MPI_ERRHANDLER_NULL;
    bool is_kept_ = false;
};

/// The memory that MPI writes to until all ranks have arrived.
struct MpiPending {
    MPI_Comm made = MPI_COMM_NULL;
    std::vector<std::uint64_t> words = {}; ///< of each rank, and this rank's again
    MPI_Request request = MPI_REQUEST_NULL;
};
/// @throws TimedOut  not all ranks have arrived by the deadline. `pending` is then never freed.
inline void
finish(std::unique_ptr<MpiPending>& pending, std::chrono::nanoseconds deadline, char const* call) {
    auto const is_done = [&] {
        int is_so = 0;
        check_mpi(MPI_Test(&pending->request, &is_so, MPI_STATUS_IGNORE), call);
        return is_so != 0;
    };
    if (!wait_at_most(deadline, is_done, MpiPause{})) {
        static_cast<void>(pending.release());
        throw TimedOut{
            {},
            concat(
                "some ranks of an MPI communicator did not come within ",
                std::chrono::duration<double>(deadline).count(),
                " s; MPI does not tell which"
            )
        };
    }
}

/// Collective; ends at the deadline. Only all ranks together can free an MPI communicator. If a
/// rank throws later, its duplicate is never freed, and neither is one that is incomplete at the
/// deadline.
/// @throws TimedOut            some ranks did not come.
/// @throws CommunicationError  MPI reports an error.
[[nodiscard]] inline MPI_Comm duplicate(MPI_Comm comm, std::chrono::nanoseconds deadline) {
    auto pending = std::make_unique<MpiPending>();
    check_mpi(MPI_Comm_idup(comm, &pending->made, &pending->request), "MPI_Comm_idup");
    finish(pending, deadline, "MPI_Comm_idup");
    return pending->made;
}
/// Collective; ends at the deadline. A rank whose deadline passed earlier does not call this. A
/// late rank that found the others' earlier part complete thus ends at its own deadline.
/// Returns one word from each rank.
/// @throws as duplicate() does.
[[nodiscard]] inline std::vector<std::uint64_t>
meet(MPI_Comm comm, std::uint64_t word, std::chrono::nanoseconds deadline) {
    int size = 0;
    check_mpi(MPI_Comm_size(comm, &size), "MPI_Comm_size");
    auto pending = std::make_unique<MpiPending>();
    pending->words.resize(static_cast<std::size_t>(size) + 1, word);
    std::uint64_t* const words = pending->words.data();
    check_mpi(
        MPI_Iallgather(
            words + size, 1, MPI_UINT64_T, words, 1, MPI_UINT64_T, comm, &pending->request
        ),
        "MPI_Iallgather"
    );
    finish(pending, deadline, "MPI_Iallgather");
    pending->words.pop_back();
    return std::move(pending->words);
}

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/mpi/detail/alarm.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The control messages between ranks. The value is the message's tag.
enum class MpiWord : int {
    abort,      ///< with a reason
    leave,      ///< the last message of a rank that closes: what it has done
    gone,       ///< the last message of a rank that has stopped
    unwound,    ///< the same of a rank whose operations were complete when an exception ended it
    keep_alive, ///< it is working
    question,   ///< how many collectives have you posted? Has a number
    answer,     ///< that number, and the count
};

/// Small control messages between all ranks, over a separate communicator, so that data does not
/// delay them. Every wait polls them. They are small enough that MPI sends them at once, whatever
/// the receivers do.
class MpiAlarm {
public:
    /// MPI implementations send about 4 KiB without asking the receiver. A reason also has a bit
    /// for each rank.
    static constexpr std::size_t most_bytes = 3800;

    MpiAlarm(MPI_Comm comm, int rank, int size) : comm_{comm}, rank_{rank}, size_{size} {
        listen();
    }
    MpiAlarm(MpiAlarm const&) = delete;
    MpiAlarm& operator=(MpiAlarm const&) = delete;

    void tell(int to, MpiWord word, std::span<std::byte const> body = {}) {
        Sent& sent = sent_.emplace_back();
        sent.body.assign(body.begin(), body.end());
        check_mpi(
            MPI_Isend(
                sent.body.data(),
                static_cast<int>(body.size()),
                MPI_BYTE,
                to,
                static_cast<int>(word),
                comm_,
                &sent.request
            ),
            "MPI_Isend"
        );
    }
    void tell_all(MpiWord word, std::span<std::byte const> body = {}) {
        for (int to = 0; to < size_; ++to) {
            if (to != rank_) {
                tell(to, word, body);
            }
        }
    }

    /// Calls take(word, from, body) for each message that has arrived. A message for which that
    /// throws, because there is no memory, stays for the next poll; and so does an error of MPI.
    template <class Take>
    void poll(Take const& take) {
        while (has_arrived()) {
            take(arrived_->word, arrived_->from, std::span{received_}.first(arrived_->bytes));
            arrived_.reset();
            listen();
        }
        if (!sent_.empty()) {
            static_cast<void>(has_sent());
        }
    }
    /// Whether MPI has taken all messages.
    [[nodiscard]] bool has_sent() {
        sent_.remove_if([](Sent& sent) {
            int is_done = 0;
            check_mpi(MPI_Test(&sent.request, &is_done, MPI_STATUS_IGNORE), "MPI_Test");
            return is_done != 0;
        });
        return sent_.empty();
    }

    /// Stops receiving.
    void stop_listening() {
        if (receive_ != MPI_REQUEST_NULL) {
            check_mpi(MPI_Cancel(&receive_), "MPI_Cancel");
            check_mpi(MPI_Wait(&receive_, MPI_STATUS_IGNORE), "MPI_Wait");
        }
    }
    /// Frees the communicator. @pre each rank has sent its last message and has received the last
    /// messages of all
    void close() {
        stop_listening();
        check_mpi(MPI_Comm_free(&comm_), "MPI_Comm_free");
    }

private:
    struct Sent {
        std::vector<std::byte> body;
        MPI_Request request = MPI_REQUEST_NULL;
    };

    /// A message in received_.
    struct Arrived {
        MpiWord word;
        int from;
        std::size_t bytes;
    };

    [[nodiscard]] bool has_arrived() {
        if (receive_ != MPI_REQUEST_NULL) {
            int is_there = 0;
            MPI_Status status;
            code_ = MPI_Test(&receive_, &is_there, &status);
            if (code_ != MPI_SUCCESS) {
                receive_ = MPI_REQUEST_NULL; // do not test it again: MPI may have freed it
            } else if (is_there != 0) {
                int bytes = 0;
                static_cast<void>(MPI_Get_count(&status, MPI_BYTE, &bytes));
                arrived_ = {
                    static_cast<MpiWord>(status.MPI_TAG),
                    status.MPI_SOURCE,
                    static_cast<std::size_t>(bytes)
                };
            }
        }
        check_mpi(code_, "MPI_Test");
        return arrived_.has_value();
    }
    void listen() {
        if (size_ > 1) {
            check_mpi(
                MPI_Irecv(
                    received_.data(),
                    static_cast<int>(received_.size()),
                    MPI_BYTE,
                    MPI_ANY_SOURCE,
                    MPI_ANY_TAG,
                    comm_,
                    &receive_
                ),
                "MPI_Irecv"
            );
        }
    }

    MPI_Comm comm_;
    int rank_;
    int size_;
    std::array<std::byte, most_bytes> received_{};
    MPI_Request receive_ = MPI_REQUEST_NULL;
    int code_ = MPI_SUCCESS;         ///< of its last test
    std::optional<Arrived> arrived_; ///< until it is taken
    std::list<Sent> sent_;           ///< a list, because bodies must not move
};

/// A reason in the form that all ranks send: its text is cut to fit into a message. A group may receive the
/// reason of its parent, with ranks that the group does not have.
[[nodiscard]] inline AbortReason sendable(AbortReason reason, int size) {
    std::erase_if(reason.ranks, [&](int rank) { return reason.origin < 0 && rank >= size; });
    return *unpacked_reason(packed(reason, MpiAlarm::most_bytes));
}

/// The last message of a rank that closes, to one other rank.
struct MpiLeave {
    /// A collective that the rank has posted and that is not complete.
    struct Open {
        std::uint64_t number = 0;
        std::uint64_t word = 0; ///< of its Descriptor
        std::uint64_t count = 0;
        std::uint64_t has_counts = 0;

        friend bool operator==(Open const&, Open const&) = default;
    };
    std::uint64_t posted = 0;   ///< collectives
    std::uint64_t sent = 0;     ///< messages to that rank
    std::uint64_t received = 0; ///< receives that it has posted for messages from that rank
    std::uint64_t blamed = 0;   ///< the rank whose exception came first, if it is unwound
    std::vector<Open> open = {};
    bool is_gone = false;

    static constexpr std::size_t most_open = (MpiAlarm::most_bytes - 32) / sizeof(Open);

    [[nodiscard]] std::vector<std::byte> packed() const {
        std::vector<std::byte> bytes(32 + open.size() * sizeof(Open));
        std::memcpy(bytes.data(), &posted, 8);
        std::memcpy(bytes.data() + 8, &sent, 8);
        std::memcpy(bytes.data() + 16, &received, 8);
        std::memcpy(bytes.data() + 24, &blamed, 8);
        if (!open.empty()) {
            std::memcpy(bytes.data() + 32, open.data(), open.size() * sizeof(Open));
        }
        return bytes;
    }
    [[nodiscard]] static MpiLeave unpacked(std::span<std::byte const> bytes) {
        MpiLeave leave;
        std::memcpy(&leave.posted, bytes.data(), 8);
        std::memcpy(&leave.sent, bytes.data() + 8, 8);
        std::memcpy(&leave.received, bytes.data() + 16, 8);
        std::memcpy(&leave.blamed, bytes.data() + 24, 8);
        leave.open.resize((bytes.size() - 32) / sizeof(Open));
        if (!leave.open.empty()) {
            std::memcpy(leave.open.data(), bytes.data() + 32, leave.open.size() * sizeof(Open));
        }
        return leave;
    }
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/mpi/detail/messages.hpp

/// @file
/// Messages between two ranks, including those that no rank has received.

namespace joinable { inline namespace v0 { namespace detail {

[[nodiscard]] inline std::size_t bytes_of_message(MpiOperation const& operation) noexcept {
    return operation.transfer.signature.count * size_of(operation.transfer.signature.dtype);
}

inline void start_message(MpiOperation& operation, MpiLimits limits, MPI_Comm comm) {
    std::size_t const bytes = bytes_of_message(operation);
    MPI_Datatype type = MPI_BYTE;
    int count = static_cast<int>(bytes);
    if (bytes > limits.most) {
        type = operation.tables.made.emplace_back(type_of_part(DType::u8, bytes, 0, limits.most));
        count = 1;
    }
    MPI_Request& request = operation.tables.requests.emplace_back(MPI_REQUEST_NULL);
    std::byte* const data = operation.transfer.out;
    if (operation.is_send) {
        check_mpi(
            MPI_Isend(data, count, type, operation.peer, operation.tag, comm, &request), "MPI_Isend"
        );
    } else {
        check_mpi(
            MPI_Irecv(data, count, type, operation.peer, operation.tag, comm, &request), "MPI_Irecv"
        );
    }
}

/// Whether a receive has ended. MPI says only once how, so the operation keeps it.
[[nodiscard]] inline bool has_received(MpiOperation& operation) {
    if (operation.received) {
        return true;
    }
    MPI_Request& request = operation.tables.requests.front();
    int is_done = 0;
    MPI_Status status;
    int const code = MPI_Test(&request, &is_done, &status);
    int error_class = MPI_SUCCESS;
    if (code != MPI_SUCCESS) {
        check_mpi(MPI_Error_class(code, &error_class), "MPI_Error_class");
    }
    if (error_class == MPI_ERR_TRUNCATE) {
        request = MPI_REQUEST_NULL; // it has ended
        operation.received = MpiOperation::too_much;
        return true;
    }
    check_mpi(code, "MPI_Test");
    if (is_done != 0) {
        MPI_Count bytes = 0;
        check_mpi(MPI_Get_elements_x(&status, MPI_BYTE, &bytes), "MPI_Get_elements_x");
        operation.received = bytes;
    }
    return is_done != 0;
}

/// The reason if the message has another size than `rank` expects. @pre has_received()
[[nodiscard]] inline std::optional<AbortReason>
difference_of_size(MpiOperation const& operation, int rank) {
    std::size_t const expected = bytes_of_message(operation);
    MPI_Count const bytes = operation.received.value();
    if (static_cast<std::size_t>(bytes) == expected) {
        return std::nullopt;
    }
    return AbortReason{
        FailureKind::mismatch,
        both_ranks(rank, operation.peer),
        concat(
            "rank ",
            rank,
            " expects ",
            expected,
            " bytes in ",
            operation.text(),
            ", which sent ",
            bytes == MpiOperation::too_much ? to_text(std::string_view{"more"}) : to_text(bytes)
        )
    };
}

/// Whether MPI has cancelled a receive as requested (true) or has delivered its message (false).
/// Nothing if neither.
[[nodiscard]] inline std::optional<bool> is_cancelled(MpiOperation& receive) {
    int is_done = 0;
    MPI_Status status;
    check_mpi(MPI_Test(&receive.tables.requests.front(), &is_done, &status), "MPI_Test");
    if (is_done == 0) {
        return std::nullopt;
    }
    int is_so = 0;
    check_mpi(MPI_Test_cancelled(&status, &is_so), "MPI_Test_cancelled");
    return is_so != 0;
}

/// Receives and discards the next message of a rank. Returns whether there was one.
[[nodiscard]] inline bool drop_message(int from, MPI_Comm comm) {
    int is_there = 0;
    MPI_Status status; // not MPI_Improbe: it would take the message before there is memory for it
    check_mpi(MPI_Iprobe(from, MPI_ANY_TAG, comm, &is_there, &status), "MPI_Iprobe");
    if (is_there == 0) {
        return false;
    }
    MPI_Count bytes = 0;
    check_mpi(MPI_Get_elements_x(&status, MPI_BYTE, &bytes), "MPI_Get_elements_x");
    int const room = static_cast<int>((std::min)(bytes, static_cast<MPI_Count>(INT_MAX)));
    std::vector<std::byte> dropped(static_cast<std::size_t>(room));
    check_mpi(
        MPI_Recv(dropped.data(), room, MPI_BYTE, from, status.MPI_TAG, comm, MPI_STATUS_IGNORE),
        "MPI_Recv"
    );
    return true;
}

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/mpi/options.hpp

namespace joinable { inline namespace v0 {

/// How an MPI communicator behaves. The same on all ranks.
struct MpiOptions {
    /// Applies to construction and all waits. A collective that all ranks have posted in time gets
    /// one more deadline to complete; after that it ends in CommunicationError, even if it is only
    /// slow. In split() and share() MPI blocks once all ranks have met, and no deadline ends that.
    std::chrono::nanoseconds deadline = default_deadline;
    /// How long a rank waits for the others beyond that: at a deadline for their answers, and after an
    /// abort for them to close. Shorter ends a job sooner in which a rank does neither; longer names
    /// fewer ranks that only have a busy machine.
    std::chrono::nanoseconds patience = std::chrono::seconds{2};
    /// Ranks compare what they are about to do before data moves, and all throw Mismatch if it
    /// differs. This puts a small collective before each one. Without the comparison MPI may report
    /// an error, give wrong numbers, crash, or never finish; the last ends in CommunicationError
    /// two deadlines later. Ranks with two such communicators must wait for the collectives of both
    /// in the same order, because the data of a collective starts to move in its own waits and
    /// tests.
    /// JOINABLE_CHECK=collectives turns it on, too. Ranks agree on it when they make a communicator.
    bool check = false;
    /// Reductions of f16 and bf16 send f32 and round once. Otherwise MPI sends 16 bits and rounds
    /// every combination of two. Ranks that differ in it throw Mismatch when they make a communicator.
    bool wide = false;
};

}} // namespace joinable::v0

// ---- joinable/communicator/mpi/detail/in_flight.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// A rank's part, with `zeros` that must stay, in a collective that only the others have posted.
/// Like the others, it passes the parts of a request to MPI, and one buffer if that is both input
/// and output, because MPI's algorithms may depend on this.
[[nodiscard]] inline MpiTransfer stand_in_of(
    Descriptor const& signature, int rank, int size, std::deque<std::vector<std::byte>>& zeros
) {
    bool const is_one = !has_parts(signature.collective);
    auto const parts = is_one ? std::size_t{1} : static_cast<std::size_t>(size);
    std::size_t const bytes = signature.count * size_of(signature.dtype) * parts;
    std::byte* const in = zeros.emplace_back(bytes).data();
    std::byte* const out = is_one ? in : zeros.emplace_back(bytes).data();
    auto const all = PartSizes::equal(signature.count);
    auto const those_of_root = rank == signature.root ? all : PartSizes{};
    auto const only_root = PartSizes::only(signature.root, signature.count);
    switch (signature.collective) {
    case Collective::gather: return {signature, in, out, only_root, those_of_root};
    case Collective::scatter: return {signature, in, out, those_of_root, only_root};
    default: return {signature, in, out, all, all};
    }
}

/// Why an MPI error on this rank ends all ranks.
[[nodiscard]] inline AbortReason reason_of_mpi_error(int rank, CommunicationError const& error) {
    return {FailureKind::communication, {}, concat("rank ", rank, ": ", error.what())};
}

/// A rank's operations that MPI has not completed: starts them, compares them, and ends them. It
/// knows nothing of the rank's failure but that it has lost() them.
class MpiInFlight {
public:
    /// Ends the rank for a reason, and throws.
    using Fail = std::function<void(AbortReason const&)>;

    /// `beside` is a communicator of the same ranks, on which they compare collectives.
    MpiInFlight(
        MPI_Comm data,
        MPI_Comm beside,
        int rank,
        int size,
        MpiLimits limits,
        std::shared_ptr<MpiLock> lock,
        Fail fail
    )
        : data_{data}, beside_{beside}, rank_{rank}, size_{size}, limits_{limits},
          calls_{data, rank, size, limits}, fail_{std::move(fail)},
          memory_{std::make_shared<MpiMemory>(std::move(lock))} {}
    MpiInFlight(MpiInFlight const&) = delete;
    MpiInFlight& operator=(MpiInFlight const&) = delete;

    [[nodiscard]] std::shared_ptr<MpiMemory> const& memory() const noexcept { return memory_; }
    /// How many collectives the rank has posted.
    [[nodiscard]] std::uint64_t posted() const noexcept { return posted_; }

    [[nodiscard]] MpiOperation& post(Request const& request, MpiOptions const& options) {
        MpiOperation& operation = opened([&](MpiOperation& made) {
            made.prepare(request, *memory_, options.wide);
            calls_.reserve(made.transfer, made.tables);
            if (options.check) {
                made.comparison.begin(made.signature(), rank_, size_);
            }
        });
        operation.number = posted_++;
        if (options.check) {
            operation.state = MpiOperation::State::checking;
            ++unchecked_;
            require_for(operation, [&] { sum_words(operation, beside_); });
        } else {
            operation.state = MpiOperation::State::under_way;
            require_for(operation, [&] { calls_.start(operation.transfer, operation.tables); });
        }
        return operation;
    }
    /// `number` counts the messages with this peer in this direction.
    [[nodiscard]] MpiOperation&
    post_message(bool is_send, int peer, int tag, Buffer buffer, std::uint64_t number) {
        MpiOperation& operation = opened([&](MpiOperation& made) {
            made.is_send = is_send;
            made.peer = peer;
            made.tag = tag;
            made.number = number;
            made.prepare_message(buffer, *memory_);
            made.tables.reserve(1, 0, 1);
        });
        operation.state = MpiOperation::State::under_way;
        require_for(operation, [&] { start_message(operation, limits_, data_); });
        return operation;
    }
    /// Whether it is complete now.
    [[nodiscard]] bool advance(MpiOperation& operation) {
        if (unchecked_ != 0) { // else a rank that waits for another one would delay this one
            for (MpiOperation* const open : open_) { // in the order of posts
                if (!start_when_checked(*open)) {
                    break;
                }
            }
        }
        if (operation.state != MpiOperation::State::under_way || !have_requests_ended(operation)) {
            return false;
        }
        complete(operation);
        return true;
    }
    /// The same for all operations.
    void advance_all() {
        for (std::size_t i = 0; i < open_.size();) { // advance() removes what is complete
            i += advance(*open_[i]) ? 0U : 1U;
        }
    }
    /// The operations that are not complete, in the order of posts.
    [[nodiscard]] std::deque<MpiOperation*> const& open() const noexcept { return open_; }
    /// @pre MPI has finished it
    void complete(MpiOperation& operation) {
        operation.deliver(*memory_);
        open_.erase(std::find(open_.begin(), open_.end(), &operation));
    }
    /// The caller no longer waits for it.
    void release(MpiOperation& operation) {
        if (operation.state == MpiOperation::State::complete) {
            operations_.give_back(operation);
        } else { // its buffer belongs to the caller again
            operation.state = MpiOperation::State::lost;
        }
    }
    /// The oldest collective that is not complete; null if there is none.
    [[nodiscard]] MpiOperation* oldest_collective() const {
        auto const oldest = std::find_if(open_.begin(), open_.end(), [](MpiOperation const* one) {
            return !one->is_message();
        });
        return oldest == open_.end() ? nullptr : *oldest;
    }

    // -- the end ----------------------------------------------------------------------------------

    /// The rank has failed. Finishes the operations that MPI has completed. Open ones stay with
    /// MPI, except receives.
    void lose() {
        memory_->hold();
        unchecked_ = 0;
        for (MpiOperation* const operation : open_) {
            if (has_just_ended(*operation)) {
                operation->deliver(*memory_);
                continue;
            }
            operation->state = MpiOperation::State::lost;
            auto& requests = operation->tables.requests;
            if (operation->is_receive() && !operation->is_refused && !requests.empty() &&
                requests.front() != MPI_REQUEST_NULL) {
                static_cast<void>(MPI_Cancel(&requests.front()));
            }
        }
        std::erase_if(open_, [](MpiOperation const* operation) {
            return operation->state == MpiOperation::State::complete;
        });
    }
    /// Whether the other ranks can complete the collectives that are open here. `compares`: ranks
    /// compare collectives before they start them.
    [[nodiscard]] bool can_be_left(bool compares) const {
        return open_.size() <= MpiLeave::most_open && (open_.empty() || !compares) &&
               std::none_of(open_.begin(), open_.end(), [](MpiOperation* operation) {
                   return operation->is_refused || (operation->is_message() && operation->is_send &&
                                                    !has_ended(operation->tables));
               });
    }
    [[nodiscard]] std::vector<MpiLeave::Open> open_collectives() const {
        std::vector<MpiLeave::Open> open;
        for (MpiOperation const* const operation : open_) {
            auto const& signature = operation->transfer.signature;
            if (!operation->is_message()) {
                open.push_back(
                    {operation->number,
                     signature.word(),
                     signature.count,
                     signature.has_counts ? 1U : 0U}
                );
            }
        }
        return open;
    }
    /// Completes the collectives that are open on any rank. A rank that has not posted one takes
    /// part with zeros. `is_cancelled(peer)` hears of a receive that MPI will not complete. Returns
    /// whether MPI has finished with all operations within the patience.
    template <class IsCancelled>
    [[nodiscard]] bool drain(
        std::vector<MpiLeave::Open> const& open_anywhere,
        std::chrono::nanoseconds patience,
        IsCancelled const& is_cancelled
    ) {
        for (MpiLeave::Open const& one : open_anywhere) {
            if (one.number >= posted_) {
                stand_in(Descriptor::of_word(one.word, one.count, false));
            }
        }
        auto const have_stopped = [&] {
            return std::all_of(open_.begin(), open_.end(), [&](MpiOperation* const operation) {
                return has_stopped(*operation, is_cancelled);
            });
        };
        bool const is_over = wait_at_most(patience, have_stopped, MpiPause{});
        for (MpiOperation* const operation : open_) {
            if (is_over) {
                operation->give_back(*memory_);
            }
        }
        return is_over;
    }

private:
    /// A new operation, which is open. prepare(operation) gets all memory that the operation needs up
    /// to its end. If there is none, no operation was posted, and a later one gets the memory of this
    /// one.
    template <class Prepare>
    [[nodiscard]] MpiOperation& opened(Prepare const& prepare) {
        MpiOperation& operation = operations_.next();
        try {
            prepare(operation);
            open_.push_back(&operation);
        } catch (...) {
            operation.give_back(*memory_);
            operations_.give_back(operation);
            throw;
        }
        return operation;
    }
    /// Runs f(). An MPI error in it ends all ranks, and MPI keeps the operation's memory.
    template <class F>
    void require_for(MpiOperation& operation, F const& f) {
        operation.is_refused = true;
        try {
            f();
        } catch (CommunicationError const& error) {
            fail_(reason_of_mpi_error(rank_, error));
        }
        operation.is_refused = false;
    }
    [[nodiscard]] bool have_requests_ended(MpiOperation& operation) {
        bool is_done = false;
        require_for(operation, [&] {
            is_done =
                operation.is_receive() ? has_received(operation) : has_ended(operation.tables);
        });
        if (is_done && operation.is_receive()) {
            if (auto const reason = difference_of_size(operation, rank_)) {
                fail_(*reason);
            }
        }
        return is_done;
    }
    /// Whether its data has started to move.
    [[nodiscard]] bool start_when_checked(MpiOperation& operation) {
        if (operation.state >= MpiOperation::State::under_way) {
            return true;
        }
        if (!have_requests_ended(operation)) {
            return false;
        }
        operation.tables.requests.clear();
        if (auto const reason = operation.comparison.difference()) {
            fail_(*reason);
        }
        if (operation.comparison.go_on(operation.transfer.sends, operation.transfer.expects)) {
            require_for(operation, [&] { sum_words(operation, data_); });
            return false;
        }
        operation.comparison.end();
        operation.state = MpiOperation::State::under_way;
        --unchecked_;
        require_for(operation, [&] { calls_.start(operation.transfer, operation.tables); });
        return true;
    }
    /// The same after the rank has failed: it cannot fail again.
    [[nodiscard]] bool has_just_ended(MpiOperation& operation) {
        try {
            return operation.state == MpiOperation::State::under_way && !operation.is_refused &&
                   have_requests_ended(operation);
        } catch (...) {
            return false;
        }
    }
    /// Whether MPI has finished with an operation that an abort interrupted.
    template <class IsCancelled>
    [[nodiscard]] bool has_stopped(MpiOperation& operation, IsCancelled const& is_cancelled) {
        if (!operation.is_receive()) {
            return has_ended(operation.tables);
        }
        auto const is_so = detail::is_cancelled(operation);
        if (is_so.value_or(false)) {
            is_cancelled(operation.peer);
        }
        return is_so.has_value();
    }
    /// Takes part in a collective that the others have posted.
    void stand_in(Descriptor const& signature) {
        MpiOperation& operation = operations_.next();
        operation.transfer = stand_in_of(signature, rank_, size_, zeros_);
        operation.number = posted_++;
        operation.state = MpiOperation::State::lost;
        open_.push_back(&operation);
        calls_.start(operation.transfer, operation.tables);
    }

    MPI_Comm data_;
    MPI_Comm beside_;
    int rank_;
    int size_;
    MpiLimits limits_;
    MpiCalls calls_;
    Fail fail_;
    std::shared_ptr<MpiMemory> memory_;
    MpiOperations operations_{size_};
    std::deque<MpiOperation*> open_;           ///< in the order of posts
    std::uint64_t posted_ = 0;                 ///< collectives
    std::size_t unchecked_ = 0;                ///< those that are not compared yet
    std::deque<std::vector<std::byte>> zeros_; ///< for collectives of other ranks
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/mpi/detail/peers.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// An exception ended a rank between its operations.
struct MpiUnwinding {
    int blamed = -1;                                  ///< the rank where that was first
    std::chrono::steady_clock::time_point heard_at{}; ///< here
};

/// One rank's control messages to and from the others, and what it has learned from them.
class MpiPeers {
public:
    /// `patience`: for how long answers are waited for.
    MpiPeers(MPI_Comm comm, int rank, int size, std::chrono::nanoseconds patience)
        : rank_{rank}, patience_{patience}, others_(static_cast<std::size_t>(size)),
          alarm_{comm, rank, size} {}

    [[nodiscard]] int size() const noexcept { return static_cast<int>(others_.size()); }

    void tell_all(MpiWord word, std::span<std::byte const> body = {}) {
        alarm_.tell_all(word, body);
    }
    [[nodiscard]] bool has_sent() { return alarm_.has_sent(); }
    /// Reports that this rank is working, but at most ten times per deadline, or once a second.
    /// Busy ranks receive nothing, so MPI has to keep all messages to them.
    void keep_alive(std::chrono::nanoseconds deadline) {
        constexpr std::chrono::nanoseconds longest = std::chrono::seconds{1};
        auto const now = Clock::now();
        if (!told_alive_at_ || now - *told_alive_at_ >= (std::min)(deadline / 10, longest)) {
            told_alive_at_ = now;
            static_cast<void>(alarm_.has_sent());
            alarm_.tell_all(MpiWord::keep_alive);
        }
    }

    /// Receives messages. While `answers`, it answers that this rank has posted `posted`
    /// collectives. Calls end(reason) with the reason of an abort.
    template <class End>
    void poll(std::uint64_t posted, bool answers, End const& end) {
        if (is_closed_) {
            return;
        }
        if (asked_ != 0) {
            heard_at_ = Clock::now();
        }
        alarm_.poll([&](MpiWord word, int from, std::span<std::byte const> body) {
            Other& other = others_[as_index(from)];
            switch (word) {
            case MpiWord::abort: end(unpacked_reason(body).value()); break;
            case MpiWord::leave: take_leave(other, MpiLeave::unpacked(body)); break;
            case MpiWord::gone: take_leave(other, MpiLeave{.is_gone = true}); break;
            case MpiWord::unwound: {
                MpiLeave leave = MpiLeave::unpacked(body);
                leave.is_gone = true;
                if (!unwinding_) {
                    unwinding_ = MpiUnwinding{static_cast<int>(leave.blamed), Clock::now()};
                }
                take_leave(other, std::move(leave));
                break;
            }
            case MpiWord::keep_alive: other.alive_at = Clock::now(); break;
            case MpiWord::question:
                if (answers && !has_sent_last_word_) {
                    Answer answer{0, posted};
                    std::memcpy(&answer.question, body.data(), sizeof answer.question);
                    alarm_.tell(from, MpiWord::answer, std::as_bytes(std::span{&answer, 1}));
                }
                break;
            case MpiWord::answer: {
                Answer answer;
                std::memcpy(&answer, body.data(), sizeof answer);
                other.posted = answer.posted;
                other.answered = answer.question;
                break;
            }
            }
        });
    }

    /// How many messages this rank has posted to or from that rank.
    [[nodiscard]] std::uint64_t messages(int peer, bool is_send) const noexcept {
        Other const& other = others_[as_index(peer)];
        return is_send ? other.sent : other.received;
    }
    void count_message(int peer, bool is_send) noexcept {
        Other& other = others_[as_index(peer)];
        ++(is_send ? other.sent : other.received);
    }
    /// MPI has cancelled a receive from that rank.
    void discount_receive(int peer) noexcept { --others_[as_index(peer)].received; }
    /// Whether that rank has sent more messages than were received here. @pre have_all_left()
    [[nodiscard]] bool has_unreceived(int from) const noexcept {
        Other const& other = others_[as_index(from)];
        return (from == rank_ ? other.sent : other.left->sent) > other.received;
    }

    /// A rank that has left without doing its part of the operation, if there is one.
    [[nodiscard]] std::optional<int> departed_peer(MpiOperation const& operation) const noexcept {
        for (int rank = 0; has_any_left_ && rank < size(); ++rank) {
            auto const& left = others_[as_index(rank)].left;
            if (!left || (operation.is_message() && rank != operation.peer)) {
                continue;
            }
            std::uint64_t const last = !operation.is_message() ? left->posted
                                       : operation.is_send     ? left->received
                                                               : left->sent;
            if (operation.number >= last) {
                return rank;
            }
        }
        return std::nullopt;
    }

    /// The words of the first unwound rank, if there is one.
    [[nodiscard]] std::optional<MpiUnwinding> const& unwinding() const noexcept {
        return unwinding_;
    }

    // -- the deadline -----------------------------------------------------------------------------

    /// Asks the others what they have posted, unless this operation has asked already. Each
    /// operation has its own question, because the answers to an earlier one may be older than its
    /// deadline.
    void ask(MpiOperation& operation) {
        if (operation.question.number == 0) {
            ++asked_;
            alarm_.tell_all(MpiWord::question, std::as_bytes(std::span{&asked_, 1}));
            operation.question = {asked_, Clock::now()}; // not while some rank is not asked
        }
    }
    /// Whether all have answered, or their time was over when this rank last received messages: it
    /// may have slept since then, and their answers have come.
    [[nodiscard]] bool has_answers(MpiOperation const& operation) const {
        auto const& [question, asked_at] = operation.question;
        return heard_at_ - asked_at >= patience_ ||
               !any_rank(size(), [&, after = question](int rank) {
                   Other const& other = others_[as_index(rank)];
                   return rank != rank_ && other.answered < after && !other.left;
               });
    }
    /// The ranks that have not answered that they have posted the operation. The next ask() asks
    /// again.
    [[nodiscard]] std::vector<int> missing(MpiOperation& operation) const {
        operation.question = {};
        return ranks_where(size(), [&](int rank) {
            bool const is_here = others_[as_index(rank)].posted > operation.number;
            return operation.is_message() ? rank == operation.peer : rank != rank_ && !is_here;
        });
    }
    /// See detail::take_ranks_at_work.
    [[nodiscard]] std::chrono::nanoseconds
    take_at_work(std::vector<int>& overdue, std::chrono::nanoseconds deadline) const {
        return take_ranks_at_work(overdue, deadline, [&](int rank) {
            return others_[as_index(rank)].alive_at;
        });
    }

    // -- closing ----------------------------------------------------------------------------------

    /// Tells all ranks what this one leaves behind. It sends nothing more after that. `word` is
    /// leave, gone or unwound. If there is no memory for it, another call tells the other ranks.
    void say_last_word(MpiWord word, MpiLeave leave) {
        leave.is_gone = word != MpiWord::leave;
        for (int& to = told_last_word_; to < size(); ++to) {
            if (to != rank_) {
                leave.sent = others_[as_index(to)].sent;
                leave.received = others_[as_index(to)].received;
                alarm_.tell(
                    to, word, word == MpiWord::gone ? std::vector<std::byte>{} : leave.packed()
                );
            }
        }
        others_[as_index(rank_)].left = std::move(leave);
        has_sent_last_word_ = true;
    }
    [[nodiscard]] bool have_all_left() const noexcept {
        return std::all_of(others_.begin(), others_.end(), [](Other const& other) {
            return other.left.has_value();
        });
    }
    [[nodiscard]] bool is_any_gone() const noexcept {
        return std::any_of(others_.begin(), others_.end(), [](Other const& other) {
            return other.left && other.left->is_gone;
        });
    }
    /// The collectives that are open on any rank, sorted by number. They include all that some rank
    /// has not posted. Nothing if these are unknown: ranks have different collectives of one
    /// number, or some with counts, or the ranks that posted one have completed it. All ranks find
    /// the same. @pre have_all_left()
    [[nodiscard]] std::optional<std::vector<MpiLeave::Open>> open() const {
        std::vector<MpiLeave::Open> open;
        auto const [least, most] =
            std::minmax_element(others_.begin(), others_.end(), [](Other const& a, Other const& b) {
                return a.left->posted < b.left->posted;
            });
        for (Other const& other : others_) {
            open.insert(open.end(), other.left->open.begin(), other.left->open.end());
        }
        std::sort(open.begin(), open.end(), [](auto const& a, auto const& b) {
            return a.number < b.number;
        });
        std::uint64_t next = least->left->posted;
        for (std::size_t i = 0; i < open.size(); ++i) {
            bool const is_new = i == 0 || open[i].number != open[i - 1].number;
            if (open[i].has_counts != 0 || (!is_new && open[i] != open[i - 1])) {
                return std::nullopt;
            }
            next += open[i].number == next ? 1U : 0U;
        }
        if (next < most->left->posted) {
            return std::nullopt;
        }
        open.erase(std::unique(open.begin(), open.end()), open.end());
        return open;
    }
    /// Frees the communicator. @pre have_all_left()
    void close() {
        is_closed_ = true;
        alarm_.close();
    }
    /// Stops receiving, but leaves the communicator to those that still receive.
    void stop_listening() {
        is_closed_ = true;
        alarm_.stop_listening();
    }

private:
    using Clock = std::chrono::steady_clock;

    struct Answer {
        std::uint64_t question = 0;
        std::uint64_t posted = 0; ///< collectives
    };
    struct Other {
        std::uint64_t posted = 0;     ///< collectives, by its last message
        std::uint64_t answered = 0;   ///< the last of our questions that it has answered
        Clock::time_point alive_at{}; ///< its last keep_alive(); none: the clock's epoch
        std::optional<MpiLeave> left;
        std::uint64_t sent = 0; ///< messages from this rank to it
        std::uint64_t received = 0;
    };

    void take_leave(Other& other, MpiLeave leave) {
        other.posted = leave.posted;
        other.left = std::move(leave);
        has_any_left_ = true;
    }

    int rank_;
    std::chrono::nanoseconds patience_;
    std::vector<Other> others_; ///< including this one
    MpiAlarm alarm_;            ///< last, because it starts to receive, and others may throw
    bool has_any_left_ = false;
    int told_last_word_ = 0; ///< how many ranks
    bool has_sent_last_word_ = false;
    bool is_closed_ = false;
    std::uint64_t asked_ = 0;      ///< questions
    Clock::time_point heard_at_{}; ///< when it last began to receive, if it has asked
    std::optional<Clock::time_point> told_alive_at_;
    std::optional<MpiUnwinding> unwinding_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/mpi/detail/rank.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The ranks of `group`, as numbered in `whole`.
[[nodiscard]] inline std::vector<int> numbers_in(MPI_Comm whole, MPI_Comm group, int size) {
    MPI_Group from = MPI_GROUP_NULL;
    MPI_Group to = MPI_GROUP_NULL;
    check_mpi(MPI_Comm_group(group, &from), "MPI_Comm_group");
    check_mpi(MPI_Comm_group(whole, &to), "MPI_Comm_group");
    std::vector<int> ranks(static_cast<std::size_t>(size));
    std::iota(ranks.begin(), ranks.end(), 0);
    std::vector<int> numbers(ranks.size());
    check_mpi(
        MPI_Group_translate_ranks(from, size, ranks.data(), to, numbers.data()),
        "MPI_Group_translate_ranks"
    );
    check_mpi(MPI_Group_free(&from), "MPI_Group_free");
    check_mpi(MPI_Group_free(&to), "MPI_Group_free");
    return numbers;
}

/// One rank of an MPI communicator: its operations (MpiInFlight), its control messages (MpiPeers),
/// and its end. If MPI may still use its memory, it is kept until the process ends: keep().
class MpiRank : public HasWorks, public std::enable_shared_from_this<MpiRank> {
public:
    /// Owns both MPI communicators. An abort of `parent` aborts this rank.
    MpiRank(
        MPI_Comm data,
        MPI_Comm alarm,
        int rank,
        int size,
        MpiOptions const& options,
        MpiLimits limits,
        std::shared_ptr<MpiRank> parent
    )
        : data_{data}, rank_{rank}, size_{size}, options_{options}, limits_{limits},
          parent_{std::move(parent)},
          is_renumbered_{parent_ != nullptr && renumbers(numbers_in(parent_->data_, data, size))},
          lock_{parent_ == nullptr ? std::make_shared<MpiLock>() : parent_->lock_},
          in_flight_{
              data,
              alarm,
              rank,
              size,
              limits,
              lock_,
              [this](AbortReason const& reason) { fail(reason); }
          },
          peers_{alarm, rank, size, options.patience} {}
    MpiRank(MpiRank const&) = delete;
    MpiRank& operator=(MpiRank const&) = delete;

    [[nodiscard]] int rank() const noexcept { return rank_; }
    [[nodiscard]] int size() const noexcept { return size_; }
    [[nodiscard]] bool is_renumbered() const noexcept { return is_renumbered_; }
    [[nodiscard]] MPI_Comm data() const noexcept { return data_; }
    [[nodiscard]] MpiOptions const& options() const noexcept { return options_; }
    [[nodiscard]] MpiLimits limits() const noexcept { return limits_; }
    /// The callers of all functions below hold it.
    [[nodiscard]] MpiLock& lock() const noexcept { return *lock_; }
    [[nodiscard]] MpiLock::Held hold() const {
        require_here(rank_); // in another process, no thread may be there to let it go
        return lock_->take();
    }
    [[nodiscard]] std::shared_ptr<MpiMemory> const& memory() const noexcept {
        return in_flight_.memory();
    }
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) noexcept {
        return std::exchange(options_.deadline, deadline);
    }

    // -- collectives and messages -----------------------------------------------------------------

    [[nodiscard]] MpiOperation& post(Request const& request) {
        throw_if_aborted([&] { return request.signature.text(); });
        lock_->notify();
        return in_flight_.post(request, options_);
    }
    [[nodiscard]] MpiOperation& post_message(bool is_send, int peer, int tag, Buffer buffer) {
        throw_if_aborted([&] { return std::string{is_send ? "a send" : "a receive"}; });
        lock_->notify();
        std::uint64_t const number = peers_.messages(peer, is_send);
        MpiOperation& operation = in_flight_.post_message(is_send, peer, tag, buffer, number);
        peers_.count_message(peer, is_send); // not one for which there was no memory
        return operation;
    }
    void finish(MpiOperation& operation) {
        finish(operation, [&] { return progress(operation); });
    }
    template <class IsOver>
    void finish(MpiOperation& operation, IsOver const& is_over) {
        wait_until(options_.deadline, is_over, MpiPause{}, [&] { return more_time(operation); });
    }
    /// The same for the meeting before ranks block inside MPI. When an abort comes, others may
    /// already be inside. This rank then follows them, if its part of the meeting ends within half
    /// the time for which closing ranks wait for it. It does not wait for a rank that has left
    /// without coming. Where it has no memory for a message, it goes on, too.
    void finish_meeting(MpiOperation& operation) {
        auto const is_over = [&] { return if_memory([&] { return progress(operation); }); };
        try {
            finish(operation, is_over);
        } catch (...) { // an abort may be a ContractViolation, too, which is no Error
            bool const is_met = operation.state == MpiOperation::State::lost &&
                                operation.moves_data() && has_met(operation);
            if (!is_met) {
                throw;
            }
            in_flight_.complete(operation);
        }
    }
    [[nodiscard]] bool test(MpiOperation& operation) {
        if (progress(operation)) {
            return true;
        }
        operation.polled.extend_when_reached(options_.deadline, WaitClock::gap_of_tests, [&] {
            return more_time(operation);
        });
        return false;
    }
    /// Whether the operation is complete.
    /// @throws the error that ended the rank, if that came first.
    [[nodiscard]] bool progress(MpiOperation& operation) {
        if (operation.state == MpiOperation::State::complete) {
            return true;
        }
        if (operation.state != MpiOperation::State::lost) {
            if (in_flight_.advance(operation)) {
                return true;
            }
            poll();
            if (operation.state == MpiOperation::State::complete) { // before an abort
                return true;
            }
            if (auto const rank = peers_.departed_peer(operation); rank && !failure_) {
                abort(reason_of_leaving(*rank));
            }
        }
        throw_if_aborted([&] { return operation.text(); });
        return false;
    }
    /// Whether waiting for it would return at once, or throw.
    [[nodiscard]] static bool is_done(MpiOperation const& operation) noexcept {
        return operation.state >= MpiOperation::State::complete;
    }
    [[nodiscard]] static char const* kind_of(MpiOperation const& operation) noexcept {
        return operation.is_message() ? "a message" : "a collective";
    }
    /// The operations in flight.
    struct InFlight {
        std::size_t open = 0;
        std::uint64_t posted = 0;

        friend bool operator==(InFlight const&, InFlight const&) = default;
    };
    /// Tests all open operations, without a deadline. A failure ends all ranks; the
    /// user's thread throws it.
    InFlight help() noexcept {
        try {
            in_flight_.advance_all();
            poll();
            for (MpiOperation const* const operation : in_flight_.open()) {
                if (auto const rank = peers_.departed_peer(*operation); rank && !failure_) {
                    fail(reason_of_leaving(*rank));
                }
            }
        } catch (...) {
            if (!failure_) { // there is no memory
                abort_for_exception(*this, "its ProgressThread");
            }
        }
        return {failure_ ? 0 : in_flight_.open().size(), in_flight_.posted()};
    }
    void release(MpiOperation& operation) { in_flight_.release(operation); }

    /// The ranks that have not posted this rank's oldest unfinished collective, as far as ranks
    /// answer. Ranks answer while they wait or test.
    [[nodiscard]] std::vector<int> missing_ranks() {
        poll();
        MpiOperation* const oldest = in_flight_.oldest_collective();
        if (oldest == nullptr || failure_) {
            return {};
        }
        MpiOperation& operation = *oldest;
        require([&] { peers_.ask(operation); });
        for (MpiPause pause; !peers_.has_answers(operation) && !failure_; pause()) {
            poll();
        }
        std::vector<int> missing = peers_.missing(operation);
        return failure_ || in_flight_.advance(operation) ? std::vector<int>{} : missing;
    }

    // -- the end ----------------------------------------------------------------------------------

    void abort(AbortReason const& reason) {
        if (!failure_) {
            poll();
        }
        if (!failure_) {
            take_over(sendable(reason, size_));
            tell_reason();
        }
    }
    [[noreturn]] void fail(AbortReason const& reason) {
        abort(reason);
        throw_failure(*failure_);
    }
    [[nodiscard]] std::optional<AbortReason> const& abort_reason() {
        poll();
        return failure_;
    }
    [[nodiscard]] bool is_aborted() { return abort_reason().has_value(); }
    /// `what()` names what begins or waits now.
    template <class F>
    void throw_if_aborted(F const& what) {
        take_over_from_parents();
        if (failure_) {
            throw_failure(in_words_of(rank_, what(), *failure_));
        }
    }
    void keep_alive() {
        if (!failure_) {
            require([&] { peers_.keep_alive(options_.deadline); });
        }
    }
    /// Runs f(). An MPI error in it ends all ranks.
    template <class F>
    void require(F const& f) {
        try {
            f();
        } catch (CommunicationError const& error) {
            fail(reason_of_mpi_error(rank_, error));
        }
    }

    /// The rank's last act. Collective unless it is unwinding: waits for the others up to the
    /// deadline, or briefly after an abort. Ranks complete for each other the collectives that an
    /// abort interrupted. If they cannot, or a rank has ended, MPI keeps this rank's memory.
    void close(bool is_unwinding) noexcept {
        if (!is_mpi_running()) {
            keep();
            return;
        }
        try {
            poll_if_memory();
            if (is_unwinding && !failure_) {
                if (in_flight_.open().empty()) {
                    if_memory([&] {
                        take_over_unwinding({rank_, std::chrono::steady_clock::now()});
                        return true;
                    });
                } else {
                    abort_for_exception(*this, what_unwinds);
                }
            }
            if (failure_ && !has_told_ && !unwinding_) {
                tell_reason(); // else others may first learn that this rank has left
            }
            bool const is_staying =
                !is_unwinding && !unwinding_ && in_flight_.can_be_left(options_.check);
            bool const has_said =
                wait_patiently(options_.patience, [&] { return say_last_word(is_staying); });
            bool const is_over =
                has_said && is_staying && hear_last_words() && drain() && drop_messages();
            bool const has_sent =
                wait_patiently(options_.patience, [&] { return peers_.has_sent(); });
            if (!is_over || !has_sent) {
                keep();
                peers_.stop_listening();
                return;
            }
            memory()->release();
            peers_.close();
            check_mpi(MPI_Comm_free(&data_), "MPI_Comm_free");
        } catch (...) {
            keep();
        }
    }

private:
    static constexpr char const* what_unwinds = "the scope of its communicator";

    // -- what the others say ----------------------------------------------------------------------

    /// Receives messages, here and in the parent groups. An MPI error there ends this rank.
    void poll() {
        if (parent_ != nullptr) {
            parent_->poll();
            take_over_from_parents();
        }
        try {
            peers_.poll(in_flight_.posted(), !failure_, [this](AbortReason const& reason) {
                take_over(reason);
            });
            if (auto const& heard = peers_.unwinding(); heard && !can_complete(*heard)) {
                take_over_unwinding(*heard);
            }
        } catch (CommunicationError const& error) {
            if (!failure_) {
                take_over(sendable(reason_of_mpi_error(rank_, error), size_));
                tell_reason();
            }
        }
    }
    /// Whether what is open here may still complete without the unwound ranks. They have completed
    /// their part of it, and what it brings may be the reason for which they ended: a guard tells
    /// all ranks of a failure in a collective. Their messages are faster than the data.
    [[nodiscard]] bool can_complete(MpiUnwinding const& unwinding) const {
        auto const& open = in_flight_.open();
        return !open.empty() &&
               std::none_of(
                   open.begin(),
                   open.end(),
                   [&](MpiOperation const* one) { return peers_.departed_peer(*one).has_value(); }
               ) &&
               std::chrono::steady_clock::now() - unwinding.heard_at < options_.patience / 2;
    }
    /// All ranks have heard, or will hear, of that from the unwound rank, so this one does not tell
    /// them; it repeats the blame in its last word, which may come first.
    void take_over_unwinding(MpiUnwinding const& unwinding) {
        if (!failure_) {
            unwinding_ = unwinding;
            take_over(reason_of_exception(unwinding.blamed, what_unwinds));
        }
    }
    /// Tells the others why this rank has failed, as far as MPI can. Ranks that do not receive this
    /// learn later that this rank has left.
    void tell_reason() noexcept {
        try {
            peers_.tell_all(MpiWord::abort, packed(*failure_, MpiAlarm::most_bytes));
            has_told_ = true;
            static_cast<void>(peers_.has_sent());
        } catch (...) { // NOLINT(bugprone-empty-catch): this rank has failed already
        }
    }
    void take_over_from_parents() {
        for (MpiRank const* one = parent_.get(); one != nullptr; one = one->parent_.get()) {
            if (one->unwinding_ && !can_complete(*one->unwinding_)) {
                take_over_unwinding(*one->unwinding_);
            } else if (one->failure_ && !one->unwinding_) {
                AbortReason reason = *one->failure_;
                reason.has_left = false; // not this group, in which its ranks have other numbers
                take_over(reason);
            }
        }
    }
    void take_over(AbortReason const& reason) {
        if (!failure_) {
            failure_ = reason;
            failure_->is_renumbered = is_renumbered_;
            in_flight_.lose();
        }
    }
    /// At the deadline: how much longer to wait. Nothing if that is not known yet.
    /// @throws TimedOut
    [[nodiscard]] std::optional<std::chrono::nanoseconds> more_time(MpiOperation& operation) {
        require([&] { peers_.ask(operation); });
        if (!peers_.has_answers(operation)) {
            return std::nullopt;
        }
        std::vector<int> overdue = peers_.missing(operation);
        if (overdue.empty()) { // all ranks have arrived, and MPI is working
            if (std::exchange(operation.is_stalled, true)) {
                fail(reason_of_stall(rank_, operation));
            }
            return options_.deadline;
        }
        auto const left = peers_.take_at_work(overdue, options_.deadline);
        if (!overdue.empty()) {
            fail(reason_of_delay(
                overdue, "arrive", options_.deadline, rank_, "waits in " + operation.text()
            ));
        }
        return left;
    }

    /// f(), or false if there is no memory for it. What it has not heard stays for the next poll.
    template <class F>
    static bool if_memory(F const& f) {
        try {
            return f();
        } catch (std::bad_alloc const&) {
            return false;
        }
    }
    void poll_if_memory() {
        if_memory([&] {
            poll();
            return true;
        });
    }
    /// Polls until `is_so()`, or for that time. Returns whether it came true.
    template <class IsSo>
    [[nodiscard]] static bool wait_patiently(std::chrono::nanoseconds time, IsSo const& is_so) {
        return wait_at_most(time, [&] { return if_memory(is_so); }, MpiPause{});
    }
    /// Whether a meeting that an abort has interrupted ends all the same.
    [[nodiscard]] bool has_met(MpiOperation& meeting) {
        bool is_met = false;
        auto const is_decided = [&] {
            poll();
            is_met = has_ended(meeting.tables);
            return is_met || peers_.departed_peer(meeting);
        };
        static_cast<void>(wait_patiently(options_.patience / 2, is_decided));
        return is_met;
    }

    // -- closing ----------------------------------------------------------------------------------

    [[nodiscard]] bool say_last_word(bool is_staying) {
        MpiLeave leave{.posted = in_flight_.posted()};
        if (is_staying) {
            leave.open = in_flight_.open_collectives();
        } else if (unwinding_) {
            leave.blamed = static_cast<std::uint64_t>(unwinding_->blamed);
        }
        peers_.say_last_word(
            is_staying   ? MpiWord::leave
            : unwinding_ ? MpiWord::unwound
                         : MpiWord::gone,
            std::move(leave)
        );
        return true;
    }
    /// Whether all ranks have left in time, and none has stopped before.
    [[nodiscard]] bool hear_last_words() {
        auto end = end_of_wait(options_.deadline);
        bool is_short = false;
        for (MpiPause pause; !peers_.have_all_left(); pause()) {
            poll_if_memory();
            auto const now = std::chrono::steady_clock::now();
            if (failure_ && !std::exchange(is_short, true)) {
                end = (std::min)(end, end_of_wait(options_.patience, now));
            }
            if (now >= end || peers_.is_any_gone()) {
                return false;
            }
        }
        return !peers_.is_any_gone();
    }
    /// Completes the collectives that are open on any rank. All ranks have received the same
    /// messages, so all decide alike.
    [[nodiscard]] bool drain() {
        auto const open = peers_.open();
        return open && in_flight_.drain(*open, options_.patience, [&](int peer) {
            peers_.discount_receive(peer);
        });
    }
    /// Discards messages that no rank has received. MPI may give this communicator's number to the
    /// next one, which would then receive them. Returns whether all have come.
    [[nodiscard]] bool drop_messages() {
        return wait_patiently(options_.patience, [&] {
            for (int from = 0; from < size_; ++from) {
                while (peers_.has_unreceived(from)) {
                    if (!drop_message(from, data_)) {
                        return false;
                    }
                    static_cast<void>(peers_.count_message(from, false));
                }
            }
            return true;
        });
    }
    void keep() noexcept;

    MPI_Comm data_;
    int rank_;
    int size_;
    MpiOptions options_;
    MpiLimits limits_;
    std::shared_ptr<MpiRank> parent_;
    bool is_renumbered_;
    std::optional<AbortReason> failure_;
    bool has_told_ = false;                 ///< the reason to the others
    std::optional<MpiUnwinding> unwinding_; ///< the failure, if it is one
    std::shared_ptr<MpiLock> lock_;
    MpiInFlight in_flight_;
    MpiPeers peers_; ///< last, because it starts to receive, and others may throw
};

/// A rank while no ProgressThread uses it.
class HeldMpiRank {
public:
    /// @throws ContractViolation  as HasWorks::require_here().
    explicit HeldMpiRank(MpiRank& rank) : rank_{rank}, held_{rank.hold()} {}
    [[nodiscard]] MpiRank* operator->() const noexcept { return &rank_; }

private:
    MpiRank& rank_;
    MpiLock::Held held_;
};

/// Memory that MPI may still use after its rank was destroyed. It is never freed.
inline std::vector<std::shared_ptr<MpiRank>>& kept_mpi_ranks() {
    static auto& kept = *new std::vector<std::shared_ptr<MpiRank>>;
    return kept;
}

inline void MpiRank::keep() noexcept {
    static auto& mutex = *new std::mutex; // several threads may end communicators
    memory()->hold();
    try {
        std::scoped_lock const lock{mutex};
        kept_mpi_ranks().push_back(shared_from_this());
    } catch (...) {
        new std::shared_ptr<MpiRank>{shared_from_this()};
    }
}

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/mpi/detail/helper.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// @throws ContractViolation  MPI does not let several threads call it at once.
inline void require_mpi_thread_multiple() {
    int level = MPI_THREAD_SINGLE;
    check_mpi(MPI_Query_thread(&level), "MPI_Query_thread");
    if (level >= MPI_THREAD_MULTIPLE) {
        return;
    }
    std::string_view const name = level == MPI_THREAD_SERIALIZED ? "MPI_THREAD_SERIALIZED"
                                  : level == MPI_THREAD_FUNNELED ? "MPI_THREAD_FUNNELED"
                                                                 : "MPI_THREAD_SINGLE";
    throw ContractViolation{concat(
        "a ProgressThread needs MPI_THREAD_MULTIPLE, but MPI runs with ",
        name,
        ": start MPI by MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level) and look at the level that "
        "it gives, or do without a ProgressThread and call test() now and then"
    )};
}

/// The work of a ProgressThread for a rank of MPI.
class MpiHelper {
public:
    /// @throws ContractViolation  MPI's thread level is too low.
    explicit MpiHelper(std::shared_ptr<MpiRank> rank) : rank_{std::move(rank)} {
        require_mpi_thread_multiple();
        rank_->lock().add_helper(1);
    }
    ~MpiHelper() { rank_->lock().add_helper(-1); }
    MpiHelper(MpiHelper const&) = delete;
    MpiHelper& operator=(MpiHelper const&) = delete;

    /// Runs until stop().
    void run() {
        MpiRank::InFlight seen;
        PollPause pause{std::chrono::nanoseconds{0}};
        while (true) {
            auto held = rank_->lock().take_turn();
            if (stops_) {
                return;
            }
            auto const now = rank_->help();
            if (now.open == 0) {
                rank_->lock().sleep(held, std::chrono::milliseconds{10});
            }
            held.unlock();
            if (now != seen) { // something was posted, or has ended: more will follow soon
                seen = now;
                pause = PollPause{std::chrono::nanoseconds{0}};
            }
            if (now.open != 0) {
                pause();
            }
        }
    }
    void stop() { rank_->lock().stop(stops_); }

private:
    std::shared_ptr<MpiRank> rank_;
    bool stops_ = false; ///< under the lock
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/mpi/detail/session.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// MPI from its initialisation to its end, if this object has initialised it.
class MpiSession {
public:
    MpiSession() = default; ///< others have, or will
    MpiSession(MpiSession&& other) noexcept : ends_{std::exchange(other.ends_, false)} {}
    MpiSession& operator=(MpiSession&& other) noexcept {
        std::swap(ends_, other.ends_);
        return *this;
    }
    /// MPI_Finalize waits for all ranks, without a deadline. So it is called only if all ranks get here within 5 s. If
    /// one does not, mpirun ends the job, because this process ends without that call.
    ~MpiSession() {
        if (ends_ && is_mpi_running() && all_get_here()) {
            static_cast<void>(MPI_Finalize());
        }
    }

    /// Collective if MPI is not initialised.
    /// @throws ContractViolation   MPI is finalised already, and cannot begin anew; or another MPI's launcher started
    ///                             this process, so MPI connects it to nobody.
    /// @throws CommunicationError  MPI reports an error.
    [[nodiscard]] static MpiSession begin() {
        MpiSession session;
        int is_initialized = 0;
        static_cast<void>(MPI_Initialized(&is_initialized));
        if (is_initialized == 0) {
            int level = 0;
            check_mpi(
                MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread"
            );
            session.ends_ = true;
            // MPI reports some errors of waits there, whichever communicator they concern.
            check_mpi(
                MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN),
                "MPI_Comm_set_errhandler"
            );
        } else if (!is_mpi_running()) {
            throw ContractViolation{
                "MPI is finalised already, and a process can initialise it only once: an earlier "
                "from_environment() has ended it; destroy that communicator last"
            };
        }
        check_launcher();
        return session;
    }

private:
    static void check_launcher() {
        int size = 0;
        check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &size), "MPI_Comm_size");
        for (char const* const name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}) {
            char const* const told = std::getenv(name);
            if (size == 1 && told != nullptr && std::string_view{told} != "1") {
                throw ContractViolation{concat(
                    "the launcher started ",
                    told,
                    " ranks (",
                    name,
                    "), but MPI connects this one to no other: it is the launcher of another MPI than the program "
                    "was built with; use mpirun of that one"
                )};
            }
        }
    }
    static bool all_get_here() {
        MPI_Request request = MPI_REQUEST_NULL;
        int is_met = 0;
        if (MPI_Ibarrier(MPI_COMM_WORLD, &request) != MPI_SUCCESS) {
            return false;
        }
        auto const is_over = [&] {
            return MPI_Test(&request, &is_met, MPI_STATUS_IGNORE) != MPI_SUCCESS || is_met != 0;
        };
        auto const nap = [] { std::this_thread::sleep_for(std::chrono::milliseconds{1}); };
        return wait_at_most(std::chrono::seconds{5}, is_over, nap) && is_met != 0;
    }

    bool ends_ = false;
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/mpi/communicator.hpp

namespace joinable { inline namespace v0 {

/// A collective or a message of MPI. After its end MPI may still write to this rank's buffer if that
/// is in an arena. At the deadline test() first gives the ranks the patience of MpiOptions to
/// answer.
using MpiWork = detail::WorkOf<detail::MpiRank, std::reference_wrapper<detail::MpiOperation>>;

/// Ranks are those of an MPI communicator: processes on any machines, started by mpirun.
///
/// Collectives are MPI's non-blocking ones. They run on a duplicate of the given communicator, so
/// they never match the engine's. MPI determines the results: it chooses the order of
/// floating-point sums. Collectives make progress inside wait() and test(), and in a ProgressThread.
/// 16-bit numbers are combined in f32, and every combination of two is rounded; see
/// MpiOptions::wide. Counts are not limited.
///
/// MPI cannot cancel a collective. It therefore gets copies of buffers, in memory that the
/// communicator owns. Buffers in an arena of allocate() are not copied.
///
/// An abort travels as a message that every wait and test polls, so a busy rank sees it at its next
/// wait. Collectives in flight then stay with MPI, and their memory, arenas included, is kept until
/// the process ends. Ranks that all destroy their communicators without unwinding avoid this: for
/// up to MpiOptions::patience they complete these collectives for each other. That fails if a rank
/// has more than 117 collectives open, compared ones (MpiOptions::check), ones with counts, or a
/// send. It also fails if a collective is complete on all ranks that have posted it.
///
/// The first reason that a rank receives wins there. If two ranks abort at the same moment, others may hear of
/// either first, so ranks may throw different reasons. MPI handles the death of a rank: mpirun ends the job. This library never
/// calls MPI_Abort.
///
/// A wait ends at the deadline. The rank then asks the others what they have posted. Ranks that do
/// not answer within the patience are named as missing: they neither wait nor test here, and have no
/// ProgressThread. missing_ranks() asks and names them in the same way. Calls of keep_alive() are cheap: at most ten
/// per deadline, and one per second, send a message; the others wait longer from when they learn of it.
///
/// MPI errors become CommunicationError with MPI's text. But Open MPI and MPICH raise some errors of
/// waits at MPI_COMM_WORLD. These end the job unless the program has set MPI_ERRORS_RETURN there.
///
/// A send is complete when MPI has the message; the caller may then reuse the buffer. The wait() of a
/// receive throws Mismatch if the sender sent another number of bytes. Dtypes are not compared. A tag
/// is at least 0 and at most MPI's largest.
///
/// One thread at a time may use an object, its arenas, and all groups split from it or from one of
/// its groups, because a group receives aborts through its parents. ProgressThreads of these may
/// run beside it: its calls and theirs exclude each other. Without one there is no lock. Threads that run in parallel
/// need communicators that were each constructed from one of MPI's, for example from
/// native_handle(). Aborts do not pass between these. If several threads use MPI, it must be
/// initialised with MPI_THREAD_MULTIPLE.
class MpiCommunicator : public detail::RankMembers<MpiCommunicator>,
                        public detail::Collectives<MpiCommunicator, MpiWork>,
                        public detail::Messages<MpiCommunicator, MpiWork> {
public:
    static constexpr std::string_view transport = "mpi";
    /// Whether MPI is initialised, or its launcher started this process. Local.
    [[nodiscard]] static bool is_launched() {
        return detail::is_mpi_running() ||
               detail::own_environment().finds_any({"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"}
               );
    }
    /// Collective; blocks. Connects all ranks of MPI_COMM_WORLD. If nobody has initialised MPI, this does, for
    /// several threads if MPI can, and the destructor finalises it; destroy groups and arenas before. It does not if
    /// a rank does not get there within 5 s; mpirun then ends the job.
    /// @throws as the constructor; ContractViolation  MPI is finalised already, or the ranks were started by the
    ///         launcher of another MPI.
    [[nodiscard]] static MpiCommunicator from_environment(MpiOptions const& options = {}) {
        return MpiCommunicator{detail::MpiSession::begin(), options};
    }

    /// Collective; blocks. Works on duplicates of `comm`, which stays the caller's. If it throws,
    /// MPI keeps the objects that it has made until the process ends, because only all ranks
    /// together can free them.
    /// @throws ContractViolation   MPI is not initialised or is finalised; `comm` is null, an
    ///                             intercommunicator, or has more than 8192 ranks.
    /// @throws TimedOut            some ranks did not come; MPI cannot tell which. They end at
    ///                             their own deadlines. From then on nothing frees `comm`.
    /// @throws CommunicationError  MPI reports an error.
    /// @throws Mismatch            ranks differ in `wide`, in `check`, or in JOINABLE_CHECK=collectives;
    ///                             an unknown word there is a ContractViolation, and PeerFailed on the
    ///                             others.
    explicit MpiCommunicator(
        MPI_Comm comm, MpiOptions const& options = {}, detail::MpiLimits limits = {}
    )
        : MpiCommunicator{duplicated(comm, options), options, limits, nullptr} {}

    /// Collective; blocks. Takes ownership of `comm`: nothing else may use it, and this object
    /// frees it. If this throws, `comm` stays the caller's.
    [[nodiscard]] static MpiCommunicator
    from_native_handle(MPI_Comm comm, MpiOptions const& options = {}) {
        detail::check_mpi_communicator(comm);
        return MpiCommunicator{comm, options, {}, nullptr};
    }

    MpiCommunicator(MpiCommunicator const&) = delete;
    MpiCommunicator& operator=(MpiCommunicator const&) = delete;
    /// Collective. Waits for all ranks up to the deadline, or for the patience after an abort. Ranks
    /// that wait for this one throw PeerFailed. During unwinding it aborts without waiting. Other
    /// ranks may still complete, for up to half the patience, collectives to which this rank has
    /// contributed; these may tell them why.
    ~MpiCommunicator() {
        if (rank_->is_here()) {
            held()->close(unwinding_.has_begun());
        } else { // a forked process must not call MPI
            static_cast<void>(new std::shared_ptr{std::move(rank_)});
        }
    }

    /// The communicator on which collectives run. This object keeps ownership.
    [[nodiscard]] MPI_Comm native_handle() const noexcept { return rank_->data(); }

    /// Collective; blocks. The ranks with the same `color` (>= 0) form a group, ordered by `key`,
    /// then by their rank here. The group inherits deadline and options. Aborting this communicator
    /// aborts the group, but not the reverse. Errors name ranks by their numbers in the group where
    /// they occur. Use the group from one thread only while no thread uses this communicator or its
    /// other groups.
    ///
    /// MPI blocks here, so the ranks meet first. A rank that learns of an abort while it waits
    /// there continues for up to half the patience, because the others may have met already; not if
    /// a rank has left that did not come. If all meet, the group is made, and its first wait throws
    /// the reason.
    /// @throws Mismatch  some ranks call share() or something else. MPI may report an error first.
    [[nodiscard]] MpiCommunicator split(int color, int key) {
        detail::check_color(color);
        static_cast<void>(meet(detail::MpiMeeting::split, 0));
        MPI_Comm made = MPI_COMM_NULL;
        require([&] {
            detail::check_mpi(MPI_Comm_split(rank_->data(), color, key, &made), "MPI_Comm_split");
        });
        return MpiCommunicator{made, rank_->options(), rank_->limits(), rank_};
    }

    /// Local. Zeroed memory for buffers that are reduced often: MPI uses buffers in it directly,
    /// without copies. It may outlive the communicator.
    /// @throws std::bad_alloc; ContractViolation  alignment is not a power of two.
    [[nodiscard]] Arena
    allocate(std::size_t bytes, std::size_t alignment = Arena::default_alignment) {
        return detail::MpiMemory::allocate(held()->memory(), bytes, alignment);
    }

    /// For ProgressThread.
    [[nodiscard]] detail::MpiHelper helper() { return detail::MpiHelper{rank_}; }

    /// Collective; blocks. The ranks meet first, as in split(). See shared_buffer(). The memory is
    /// not MPI's, and may be used after MPI_Finalize().
    /// @throws Mismatch            sizes differ, or some ranks call something else.
    /// @throws ContractViolation   on all ranks: they are on several machines.
    /// @throws std::bad_alloc      on all ranks: `bytes` exceeds the largest possible object.
    /// @throws CommunicationError  on all ranks: one of them cannot map the memory.
    [[nodiscard]] Arena share(std::size_t bytes) {
        detail::check_same_size(meet(detail::MpiMeeting::share, bytes), is_renumbered());
        if (bytes > PTRDIFF_MAX) {
            throw std::bad_alloc{};
        }
        bool are_here = false;
        require([&] { are_here = are_on_this_machine(); });
        if (!are_here) {
            throw ContractViolation{
                "expected all ranks on one machine, as they are to share memory, but MPI has them on "
                "several: start them on one machine, or split the communicator by machines"
            };
        }
        return detail::share_mapping(*this, bytes); // a window of MPI ends with MPI
    }

private:
    MpiCommunicator(detail::MpiSession session, MpiOptions const& options)
        : MpiCommunicator{MPI_COMM_WORLD, options} {
        session_ = std::move(session);
    }
    MpiCommunicator(
        MPI_Comm owned,
        MpiOptions const& options,
        detail::MpiLimits limits,
        std::shared_ptr<detail::MpiRank> parent
    ) {
        detail::MpiErrorsReturned errors{owned};
        MPI_Comm const alarm = detail::duplicate(owned, options.deadline);
        MpiOptions agreed = options; // as the ranks of a group's parent have agreed
        auto const share = [&](std::uint64_t word) {
            return detail::meet(alarm, word, options.deadline);
        };
        if (parent == nullptr) {
            agreed.check = detail::agree_to_compare(options.check, "MpiOptions::check", share);
            detail::check_same_option(share(options.wide ? 1U : 0U), "MpiOptions::wide");
        } else {
            static_cast<void>(share(0));
        }
        int rank = 0;
        int size = 0;
        detail::check_mpi(MPI_Comm_rank(owned, &rank), "MPI_Comm_rank");
        detail::check_mpi(MPI_Comm_size(owned, &size), "MPI_Comm_size");
        rank_ = std::make_shared<detail::MpiRank>(
            owned, alarm, rank, size, agreed, limits, std::move(parent)
        );
        errors.keep();
    }

    static MPI_Comm duplicated(MPI_Comm comm, MpiOptions const& options) {
        detail::check_mpi_communicator(comm);
        detail::MpiErrorsReturned const errors{comm};
        return detail::duplicate(comm, options.deadline);
    }

    /// The ranks are about to block inside MPI, where neither an abort nor the deadline can end the
    /// wait. All of them meet first and compare what they are about to do. Returns one word from
    /// each rank.
    [[nodiscard]] std::vector<std::uint64_t> meet(detail::MpiMeeting meeting, std::uint64_t word) {
        static_cast<void>(is_aborted()); // receives an abort for which the others no longer wait
        std::array<std::uint64_t, 2> const own{static_cast<std::uint64_t>(meeting), word};
        std::vector<std::uint64_t> all(own.size() * static_cast<std::size_t>(size()));
        std::vector<std::uint64_t> words; // made here: after the meeting the others block
        words.reserve(static_cast<std::size_t>(size()));
        {
            auto work = all_gather(
                {own.data(), own.size(), DType::u64}, {all.data(), all.size(), DType::u64}
            );
            with_rank(work, [&](detail::MpiRank& rank, detail::MpiOperation& operation) {
                operation.called = name_of(meeting);
                rank.finish_meeting(operation);
            });
        }
        if (auto const reason = detail::difference_of_meetings(all)) {
            held()->fail(*reason);
        }
        for (std::size_t at = 1; at < all.size(); at += own.size()) {
            words.push_back(all[at]);
        }
        return words;
    }
    /// Runs f(), in which MPI may block. An MPI error in it ends all ranks.
    template <class F>
    void require(F const& f) {
        held()->require(f);
    }
    void check_tag(int tag) const {
        void* most = nullptr;
        int has_most = 0;
        static_cast<void>(MPI_Comm_get_attr(rank_->data(), MPI_TAG_UB, &most, &has_most));
        int const largest = has_most != 0 ? *static_cast<int*>(most) : 32'767;
        if (tag < 0 || tag > largest) {
            throw ContractViolation{detail::concat(
                "a message by MPI has a tag from 0 to ", largest, ", but was given ", tag
            )};
        }
    }
    [[nodiscard]] bool are_on_this_machine() const {
        MPI_Comm machine = MPI_COMM_NULL;
        detail::check_mpi(
            MPI_Comm_split_type(
                rank_->data(), MPI_COMM_TYPE_SHARED, rank(), MPI_INFO_NULL, &machine
            ),
            "MPI_Comm_split_type"
        );
        int here = 0;
        detail::check_mpi(MPI_Comm_size(machine, &here), "MPI_Comm_size");
        detail::check_mpi(MPI_Comm_free(&machine), "MPI_Comm_free");
        return here == size();
    }

    friend class detail::RankMembers<MpiCommunicator>;
    [[nodiscard]] detail::MpiRank& own_rank() const noexcept { return *rank_; }
    friend class detail::BasicCollectives<MpiCommunicator, MpiWork>;
    MpiWork post(detail::Request const& request) { return {*rank_, held()->post(request)}; }
    friend class detail::Messages<MpiCommunicator, MpiWork>;
    MpiWork post_message(bool is_send, int peer, int tag, Buffer buffer) {
        check_tag(tag);
        return {*rank_, held()->post_message(is_send, peer, tag, buffer)};
    }

    [[nodiscard]] detail::HeldMpiRank held() const { return detail::HeldMpiRank{*rank_}; }

    detail::MpiSession session_; // the first member: it ends after the rank
    std::shared_ptr<detail::MpiRank> rank_;
    detail::Unwinding unwinding_;
};

}} // namespace joinable::v0

// ---- joinable/mpi.hpp

/// @file
/// MPI ranks on any number of machines. Needs MPI 3 or later, such as Open MPI or MPICH: link
/// joinable::mpi, or compile with mpicxx.
