// SPDX-License-Identifier: BSL-1.0
#pragma once

// joinable in single headers, for projects that copy files. Generated from include/joinable by
// single_include/amalgamate.py: change the headers there, not this file.

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <cuda_runtime_api.h>
#include <exception>
#include <memory>
#include <nccl.h>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <unistd.h>
#include <utility>
#include <vector>

#include "join.hpp"
#include "cuda.hpp"

// ---- joinable/communicator/nccl/detail/api.hpp

/// @file
/// Maps the types and errors of NCCL and CUDA to those of this library, and back.

namespace joinable { inline namespace v0 { namespace detail {

static_assert(
    NCCL_VERSION_CODE >= NCCL_VERSION(2, 18, 1),
    "joinable/nccl.hpp needs NCCL 2.18.1 or later, which has ncclCommSplit"
);

/// NCCL has no complex numbers: those are two elements of this type. It has no integers of 16 bits and
/// no booleans either: the former are only moved, the latter are bytes.
[[nodiscard]] constexpr ncclDataType_t nccl_type(DType dtype) noexcept {
    constexpr std::array types{
        ncclFloat16,
        ncclBfloat16,
        ncclFloat32,
        ncclFloat64,
        ncclInt8,
        ncclUint8,
        ncclInt32,
        ncclUint32,
        ncclInt64,
        ncclUint64,
        ncclUint8,
        ncclFloat16,
        ncclFloat16,
        ncclFloat32,
        ncclFloat64,
    };
    static_assert(types.size() == dtype_count);
    return types[static_cast<std::size_t>(dtype)];
}

/// @throws ContractViolation  NCCL has no such operation on these elements.
[[nodiscard]] inline ncclRedOp_t nccl_op(DType dtype, ReduceOp op) {
    switch (op) {
    case ReduceOp::sum: return ncclSum;
    case ReduceOp::product:
        if (is_complex(dtype)) {
            throw ContractViolation{concat(
                "NCCL does not multiply ",
                name_of(dtype),
                "; sum the logarithms, or reduce on a communicator of the host"
            )};
        }
        return ncclProd;
    case ReduceOp::min: return ncclMin;
    case ReduceOp::max: return ncclMax;
    case ReduceOp::bit_and:
    case ReduceOp::bit_or: break;
    }
    throw ContractViolation{concat(
        "NCCL does not reduce with ",
        name_of(op),
        "; use sum, product, min or max, or reduce on a communicator of the host"
    )};
}

[[nodiscard]] constexpr bool is_error(ncclResult_t result) noexcept {
    return result != ncclSuccess && result != ncclInProgress;
}

/// NCCL's text for a result. The communicator may be null.
[[nodiscard]] inline std::string nccl_text(ncclResult_t result, ncclComm_t comm) {
    char const* const last = ncclGetLastError(comm);
    std::string_view const more = last == nullptr ? "" : last;
    return concat(ncclGetErrorString(result), more.empty() ? "" : ": ", more);
}

/// For calls that fail at once. The communicator may be null.
/// @throws CommunicationError
inline void check_nccl(ncclResult_t result, std::string_view call, ncclComm_t comm = nullptr) {
    if (is_error(result)) {
        throw CommunicationError{concat(call, " failed: ", nccl_text(result, comm))};
    }
}

/// For calls that fail only if the device or the driver does.
/// @throws CommunicationError
inline void check_cuda(cudaError_t error, std::string_view call) {
    if (error != cudaSuccess) {
        static_cast<void>(cudaGetLastError()); // else the next check reports it
        throw CommunicationError{concat(call, " failed: ", cudaGetErrorString(error))};
    }
}

/// "2.28.9".
[[nodiscard]] inline std::string nccl_version_text(int code) {
    int const major = code / 10'000;
    return concat(major, ".", code / 100 % 100, ".", code % 100);
}

/// @throws CommunicationError  the library is older than the header used for compilation.
inline void check_nccl_version() {
    int found = 0;
    check_nccl(ncclGetVersion(&found), "ncclGetVersion");
    if (found < NCCL_VERSION_CODE) {
        throw CommunicationError{concat(
            "this program was compiled for NCCL ",
            nccl_version_text(NCCL_VERSION_CODE),
            ", but the library that it runs with is NCCL ",
            nccl_version_text(found),
            ": install that version or a later one, or compile with the header of the library"
        )};
    }
}

/// `found` is CUDA's description of the buffer: NCCL's kernels on this device must reach it.
/// @throws ContractViolation
inline void
check_device_memory(ConstBuffer buffer, cudaPointerAttributes const& found, int device) {
    if (found.type != cudaMemoryTypeDevice && found.type != cudaMemoryTypeManaged) {
        throw ContractViolation{concat(
            "NCCL moves memory of device ",
            device,
            ", but was given host memory for ",
            buffer.count,
            " ",
            name_of(buffer.dtype),
            "; copy it to the device, or use a communicator of the host"
        )};
    }
    if (found.type == cudaMemoryTypeDevice && found.device != device) {
        throw ContractViolation{concat(
            "this communicator is on device ",
            device,
            ", but was given memory of device ",
            found.device,
            "; allocate it after cudaSetDevice(",
            device,
            ")"
        )};
    }
}

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/detail/can_split.hpp

#ifndef JOINABLE_COMMUNICATOR_DETAIL_CAN_SPLIT_HPP_PART_1
#define JOINABLE_COMMUNICATOR_DETAIL_CAN_SPLIT_HPP_PART_1

namespace joinable { inline namespace v0 { namespace detail {

template <class C>
concept says_whether_it_splits = requires(C const& comm) {
    { comm.can_split() } -> std::same_as<bool>;
};

/// Whether it has split(), and its transport too, if it stands for one that is known when the program runs. Local, the
/// same on all ranks.
template <Communicator Comm>
[[nodiscard]] bool can_split(Comm const& comm) {
    if constexpr (says_whether_it_splits<Comm>) {
        return comm.can_split();
    } else {
        return has_split<Comm>;
    }
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/nccl/detail/control.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The host communicator of an NCCL communicator, with the same ranks. They use it to meet, to
/// learn of aborts, and to compare their calls.
class NcclControl : public ControlCommunicator {
public:
    /// Memory that all ranks share; empty if that is not supported, or they are on several machines.
    [[nodiscard]] virtual Arena share(std::size_t bytes) = 0;
    [[nodiscard]] virtual bool can_split() const = 0;
    /// Null if that is not supported.
    [[nodiscard]] virtual std::unique_ptr<NcclControl> split(int color, int key) = 0;

    void barrier() {
        std::array<std::uint64_t, 1> word{};
        sum(word);
    }
};

/// `Held` is a communicator, or a reference to one.
template <class Held>
class NcclControlOver final : public ControlOver<Held, NcclControl> {
    using Comm = std::remove_reference_t<Held>;

public:
    using ControlOver<Held, NcclControl>::ControlOver;

    [[nodiscard]] Arena share(std::size_t bytes) override {
        if constexpr (SharesMemory<Comm>) {
            auto& comm = this->communicator();
            try {
                return comm.share(bytes);
            } catch (ContractViolation const&) { // on all ranks: they are on several machines
                if (comm.is_aborted()) {
                    throw;
                }
            }
        }
        return {};
    }
    [[nodiscard]] bool can_split() const override {
        return detail::can_split(this->communicator());
    }
    [[nodiscard]] std::unique_ptr<NcclControl> split(int color, int key) override {
        if constexpr (Splits<Comm>) {
            auto const make = [&] { return this->communicator().split(color, key); };
            return std::make_unique<NcclControlOver<decltype(make())>>(make);
        } else {
            return nullptr;
        }
    }
};

/// The control of NCCL ranks from the communicator, or from a function that makes it. Explains in one
/// sentence why a communicator cannot be one.
template <class Held, class From>
[[nodiscard]] std::unique_ptr<NcclControl> nccl_control(From& from) {
    using Comm = std::remove_reference_t<Held>;
    static_assert(
        Aborts<Comm>,
        "NcclCommunicator: the control communicator needs members 'abort(AbortReason)' and 'bool "
        "is_aborted()', by which ranks learn that one of them failed; use one that models Aborts"
    );
    static_assert(
        reduces_host_memory<Comm>,
        "NcclCommunicator: the control communicator has to move memory of the host; use a "
        "ProcessCommunicator on one machine, a TcpCommunicator on several"
    );
    return std::make_unique<NcclControlOver<Held>>(from);
}

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/nccl/detail/deadline.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// Decides how long a rank's host waits, and for which ranks. In memory that all ranks share, each
/// rank publishes how many collectives it has posted, and when it last called keep_alive(). A
/// deadline starts again if the ranks that this one waits for have called keep_alive() meanwhile.
/// Without such memory nothing is known.
class NcclDeadline {
public:
    using Clock = std::chrono::steady_clock;      ///< the same for all processes of a machine
    static constexpr std::size_t line_bytes = 64; ///< a rank's own cache line

    NcclDeadline(std::chrono::nanoseconds length, int rank, int size) noexcept
        : length_{length}, rank_{rank}, size_{size} {}

    [[nodiscard]] std::chrono::nanoseconds length() const noexcept { return length_; }
    std::chrono::nanoseconds set_length(std::chrono::nanoseconds length) noexcept {
        return std::exchange(length_, length);
    }

    /// `memory` is zeroed and has a line for each rank, or is empty.
    void share(Arena memory) noexcept { memory_ = std::move(memory); }
    [[nodiscard]] bool is_shared() const noexcept { return memory_.data() != nullptr; }
    void arrive(std::uint64_t number) const noexcept {
        if (is_shared()) {
            word(rank_, posted).store(number, std::memory_order_release);
        }
    }
    void keep_alive() const noexcept {
        if (is_shared()) {
            auto const now = static_cast<std::uint64_t>(Clock::now().time_since_epoch().count());
            word(rank_, alive_at).store(now, std::memory_order_release);
        }
    }
    /// The ranks that have not posted this collective. Empty if that is unknown, or `number` is 0.
    [[nodiscard]] std::vector<int> missing(std::uint64_t number) const {
        return ranks_where(is_shared() ? size_ : 0, [&](int rank) {
            return word(rank, posted).load(std::memory_order_acquire) < number;
        });
    }

    /// Whether some rank has not posted this collective, as far as known.
    [[nodiscard]] bool may_be_missing(std::uint64_t number) const {
        return number == 0 || !is_shared() || !missing(number).empty();
    }

    /// At the deadline: how much longer a wait may last, or fail(reason). `doing` describes the wait, and
    /// `number` is that of the collective that it is for; 0: none. The deadline starts again only if
    /// all ranks that this one is known to wait for have called keep_alive(). If those ranks are
    /// unknown, any other rank's call is enough.
    template <class Fail>
    [[nodiscard]] std::chrono::nanoseconds
    more_time(std::string_view doing, std::uint64_t number, Fail const& fail) const {
        std::vector<int> overdue = missing(number);
        bool const are_known = !overdue.empty();
        if (!are_known) {
            overdue = ranks_where(size_, [&](int other) { return other != rank_; });
        }
        std::size_t const awaited = overdue.size();
        auto const left =
            take_ranks_at_work(overdue, length_, [&](int other) { return last_sign_of(other); });
        if (are_known ? !overdue.empty() : overdue.size() == awaited) {
            overdue.resize(are_known ? overdue.size() : 0);
            fail(reason(std::move(overdue), doing, number));
        }
        return left;
    }

private:
    enum Word : std::uint8_t { posted, alive_at }; ///< of a rank's line

    [[nodiscard]] std::atomic_ref<std::uint64_t> word(int rank, Word which) const noexcept {
        std::byte* const line = memory_.data() + static_cast<std::size_t>(rank) * line_bytes;
        return std::atomic_ref<std::uint64_t>{reinterpret_cast<std::uint64_t*>(line)[which]};
    }
    /// The clock's epoch, if there was no call.
    [[nodiscard]] Clock::time_point last_sign_of(int rank) const noexcept {
        std::uint64_t const ticks =
            is_shared() ? word(rank, alive_at).load(std::memory_order_acquire) : 0;
        return Clock::time_point{Clock::duration{static_cast<Clock::rep>(ticks)}};
    }
    [[nodiscard]] AbortReason
    reason(std::vector<int> missing, std::string_view doing, std::uint64_t number) const {
        std::string who = "no answer";
        if (!missing.empty()) {
            who = concat(ranks_text(missing), " did not arrive");
        } else if (number != 0 && is_shared()) {
            who = "all ranks arrived, but nothing came";
        }
        double const seconds = std::chrono::duration<double>(length_).count();
        std::string text = concat(who, " within ", seconds, " s, while rank ", rank_, " ", doing);
        return {FailureKind::timed_out, std::move(missing), std::move(text)};
    }

    std::chrono::nanoseconds length_;
    int rank_;
    int size_;
    Arena memory_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/nccl/detail/handle.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// Holds kernels of NCCL in a CUDA graph. NCCL frees no handle while such kernels exist, so they
/// must be released before the handle, and before the windows that they use.
class HoldsNcclKernels {
public:
    /// May be called more than once.
    virtual void release_kernels() noexcept = 0;

protected:
    ~HoldsNcclKernels() = default;
};

/// NCCL's handle of one rank: none, or one that NCCL has not freed. Does not know other ranks.
class NcclHandle {
public:
    [[nodiscard]] ncclComm_t get() const noexcept { return comm_; }
    /// The handle must be alive from here on.
    void adopt(ncclComm_t comm) noexcept { comm_ = comm; }
    [[nodiscard]] ncclComm_t give_up() noexcept { return std::exchange(comm_, nullptr); }

    void add_holder(HoldsNcclKernels& holder) { holders_.push_back(&holder); }
    void remove_holder(HoldsNcclKernels& holder) noexcept { std::erase(holders_, &holder); }

    /// From here on NCCL may write to `place`, or use what it owns, until forget() or until NCCL has ended
    /// the handle. That may be after this object has gone, so the call that ends the handle keeps it.
    void keep(std::shared_ptr<void> place) { kept_->push_back(std::move(place)); }
    void forget(void const* place) noexcept {
        if (kept_ != nullptr) {
            std::erase_if(*kept_, [&](auto const& kept) { return kept.get() == place; });
        }
    }
    /// Call this before freeing anything that NCCL's kernels use.
    void release_kernels() noexcept {
        for (HoldsNcclKernels* const holder : holders_) {
            holder->release_kernels();
        }
    }

    /// Whether NCCL is still processing the last call, or its error. Success if there is no handle.
    [[nodiscard]] ncclResult_t state() const noexcept {
        ncclResult_t state = ncclSuccess;
        ncclResult_t const asked =
            comm_ == nullptr ? ncclSuccess : ncclCommGetAsyncError(comm_, &state);
        return is_error(asked) ? asked : state;
    }

    /// For use after a failure: kernels and the handle end. Returns NCCL's result, which is in progress
    /// if NCCL has not returned within `time`; see within().
    [[nodiscard]] ncclResult_t abort(std::chrono::nanoseconds time) noexcept {
        return comm_ == nullptr
                   ? ncclSuccess
                   : within(time, &ncclCommAbort, give_up(), std::exchange(kept_, nullptr));
    }
    /// NCCL frees the handle. NCCL cannot destroy a handle that is not ready, as after a network
    /// failure: it would leave a group open on this thread. `is_finalized`: all ranks have finished
    /// with it.
    void free(bool is_finalized, std::chrono::nanoseconds time) noexcept {
        if (comm_ != nullptr) {
            bool const is_ready = is_finalized && state() == ncclSuccess;
            auto* const call = is_ready ? &ncclCommDestroy : &ncclCommAbort;
            static_cast<void>(within(time, call, give_up(), std::exchange(kept_, nullptr)));
        }
    }
    /// Calls what frees a handle. NCCL then frees memory, for which CUDA waits for all work of the
    /// device, also that of other communicators, and a network may hold NCCL's own threads. So this
    /// is called on a thread of its own, which after that time goes on with it alone. Until NCCL returns,
    /// that thread owns `kept`, too. The device is the one that is current here.
    static ncclResult_t within(
        std::chrono::nanoseconds time,
        ncclResult_t (*call)(ncclComm_t),
        ncclComm_t comm,
        std::shared_ptr<void> kept = {}
    ) noexcept {
        int device = 0;
        static_cast<void>(cudaGetDevice(&device));
        auto run = [=]() mutable {
            use_cuda_device(device);
            ncclResult_t const result = call(comm);
            kept.reset(); // before the host goes on
            return result;
        };
        try {
            return run_within(time, std::move(run)).value_or(ncclInProgress);
        } catch (...) { // there is no thread
            return call(comm);
        }
    }

private:
    using Kept = std::vector<std::shared_ptr<void>>;

    ncclComm_t comm_ = nullptr;
    std::vector<HoldsNcclKernels*> holders_;
    std::shared_ptr<Kept> kept_ = std::make_shared<Kept>(); ///< null: the handle has ended
};

/// A place for the handle of a group, which NCCL writes also if it could not make the group. A handle
/// that is still there at the end is aborted.
struct NcclSplit {
    explicit NcclSplit(std::chrono::nanoseconds time) noexcept : deadline{time} {}
    NcclSplit(NcclSplit const&) = delete;
    NcclSplit& operator=(NcclSplit const&) = delete;
    ~NcclSplit() {
        if (made != nullptr) {
            static_cast<void>(NcclHandle::within(deadline, &ncclCommAbort, made));
        }
    }

    std::chrono::nanoseconds deadline;
    ncclComm_t made = nullptr;
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/nccl/detail/launch.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// One submission to NCCL, a collective or a group of them, and the event after it. Members here call
/// CUDA while a CurrentCudaDevice lives.
struct NcclLaunch {
    enum class State : std::uint8_t {
        open,     ///< a group that accepts more
        posted,   ///< possibly not on the stream yet: no event
        launched, ///< on the stream, followed by the event
        complete, ///< the results are final
        lost,     ///< they never will be final
    };
    CudaEvent done;
    State state = State::open;
    int users = 0;            ///< works and tokens that refer to it
    std::uint64_t number = 0; ///< of its last collective; messages have none

    [[nodiscard]] bool is_final() const noexcept {
        return state == State::complete || state == State::lost;
    }
    /// Call this before a wait. @throws ContractViolation
    void require_posted() const {
        if (state == State::open) {
            throw ContractViolation{
                "this work is in a group that is still open, so it cannot be waited for: end the "
                "group first"
            };
        }
    }
    /// Queries the event. Returns its error.
    cudaError_t poll() noexcept {
        if (state != State::launched) {
            return cudaSuccess;
        }
        cudaError_t const found = cudaEventQuery(done.get());
        if (found == cudaSuccess) {
            state = State::complete;
            return cudaSuccess;
        }
        return found == cudaErrorNotReady ? cudaSuccess : found;
    }
    [[nodiscard]] bool has_run() noexcept {
        static_cast<void>(poll());
        return state == State::complete;
    }
};

/// A launch as its work knows it.
struct NcclAwaited {
    NcclLaunch* launch;
    bool is_in_order = false; ///< a stream waits for it
    WaitClock polled = {};
};

class NcclLaunches;

/// The object whose group is open on this thread. NCCL has one group for all communicators of a
/// thread.
inline thread_local NcclLaunches const* grouping_launches = nullptr;

/// The submissions of one rank to NCCL. NCCL takes one submission at a time, a collective or a
/// group. At most one launch is therefore possibly not on the stream yet, and the next
/// submission waits until it is there. Launches are reused, so after a while nothing allocates.
class NcclLaunches {
public:
    NcclLaunches() = default;
    NcclLaunches(NcclLaunches const&) = delete;
    NcclLaunches& operator=(NcclLaunches const&) = delete;

    [[nodiscard]] bool has_group() const noexcept { return group_ != nullptr; }
    /// @throws ContractViolation
    void require_no_group() const {
        if (group_ != nullptr) {
            throw ContractViolation{"a group of this communicator is open, which takes collectives "
                                    "and messages only: end it first"};
        }
    }
    /// @throws ContractViolation  another rank has an open group on this thread.
    void require_no_other_group() const {
        if (grouping_launches != nullptr && grouping_launches != this) {
            throw ContractViolation{"a group of another NCCL communicator is open on this thread, "
                                    "and NCCL would put this off until it ends: end it first"};
        }
    }
    /// Null if there is none.
    [[nodiscard]] NcclLaunch const* launching() const noexcept { return launching_; }

    /// The launch for the next collective, with one more user: the open group, or a launch of its
    /// own.
    /// @throws CommunicationError  CUDA cannot create an event, or an earlier launch failed.
    [[nodiscard]] NcclLaunch& take() {
        if (group_ != nullptr) {
            ++group_->users;
            return *group_;
        }
        // wait() leaves the launch unfinished, so this asks the device. One stream runs launches
        // in order: after the first one that has not run, it need not ask about later ones.
        bool may_have_run = true;
        for (auto place = all_.begin(); place != all_.end(); ++place) {
            NcclLaunch& launch = **place;
            if (launch.users != 0) {
                continue;
            }
            if (!launch.is_final() && may_have_run) {
                check_cuda(launch.poll(), "cudaEventQuery");
                may_have_run = launch.is_final();
            }
            if (launch.is_final()) {
                std::rotate(place, place + 1, all_.end());
                return reset(launch);
            }
        }
        auto launch = std::make_unique<NcclLaunch>();
        check_cuda(make_event(launch->done), "cudaEventCreate");
        all_.push_back(std::move(launch));
        return reset(*all_.back());
    }
    /// For a launch that was taken but not submitted to NCCL.
    void give_back(NcclLaunch& launch) const noexcept {
        --launch.users;
        if (group_ == nullptr) {
            launch.state = NcclLaunch::State::lost;
        }
    }
    void count(NcclLaunch& launch, std::uint64_t collectives) noexcept {
        posted_ += collectives;
        launch.number = collectives != 0 ? posted_ : launch.number;
    }
    /// The launch has been submitted. @pre launching() is null
    void hand_over(NcclLaunch& launch) noexcept {
        launch.state = NcclLaunch::State::posted;
        launching_ = &launch;
    }
    /// NCCL has put launching() on the stream: records the event after it.
    /// @throws CommunicationError
    void record(cudaStream_t stream) {
        NcclLaunch& launch = *std::exchange(launching_, nullptr);
        check_cuda(cudaEventRecord(launch.done.get(), stream), "cudaEventRecord");
        launch.state = NcclLaunch::State::launched;
    }

    /// Collects the calls until end_group() in `launch`, to submit them together.
    void begin_group(NcclLaunch& launch) noexcept {
        group_ = &launch;
        grouping_launches = this;
    }
    /// @pre has_group()
    [[nodiscard]] NcclLaunch& end_group() noexcept {
        grouping_launches = nullptr;
        return *std::exchange(group_, nullptr);
    }

    /// Before a failure ends the handle: launches that have not run never will.
    void lose() noexcept {
        launching_ = nullptr;
        if (has_group()) { // or it would call the handle later
            static_cast<void>(end_group());
            static_cast<void>(ncclGroupEnd());
        }
        for_each_unfinished([](NcclLaunch& launch) {
            launch.state = launch.has_run() ? NcclLaunch::State::complete : NcclLaunch::State::lost;
        });
    }

    /// Whether all launches have run.
    [[nodiscard]] bool is_idle() const noexcept {
        return std::all_of(all_.begin(), all_.end(), [](auto const& launch) {
            return launch->is_final() || launch->has_run();
        });
    }
    /// The number of the first collective that has not run; 0 if all have.
    [[nodiscard]] std::uint64_t oldest_unfinished() const noexcept {
        auto const oldest = std::find_if(all_.begin(), all_.end(), [](auto const& launch) {
            return launch->number != 0 && !launch->is_final() && !launch->has_run();
        });
        return oldest == all_.end() ? 0 : (*oldest)->number;
    }
    /// Calls f(launch) for each launch that may still run, the oldest first.
    template <class F>
    void for_each_unfinished(F const& f) const {
        for (auto const& launch : all_) {
            if (!launch->is_final()) {
                f(*launch);
            }
        }
    }

private:
    static NcclLaunch& reset(NcclLaunch& launch) noexcept {
        launch.state = NcclLaunch::State::open;
        launch.users = 1;
        launch.number = 0;
        return launch;
    }

    std::vector<std::unique_ptr<NcclLaunch>> all_; ///< in the order in which they were taken
    NcclLaunch* launching_ = nullptr;
    NcclLaunch* group_ = nullptr;
    std::uint64_t posted_ = 0;
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/nccl/detail/streams.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The device of one rank, and two streams: that of its collectives, and the caller's, on which the
/// caller makes and uses data. Members that call CUDA do so while a CurrentCudaDevice lives, and throw
/// CommunicationError if it fails.
class NcclStreams {
public:
    explicit NcclStreams(cudaStream_t caller) noexcept : caller_{caller} {}
    NcclStreams(NcclStreams const&) = delete;
    NcclStreams& operator=(NcclStreams const&) = delete;

    /// Call this once. Takes the current device. Collectives run on `stream`, or on a new stream if
    /// there is none.
    void use_device(std::optional<cudaStream_t> stream) {
        check_cuda(
            cudaGetDevice(&device_),
            "an NCCL rank needs a GPU that this process can use, but cudaGetDevice"
        );
        check_cuda(make_event(ready_), "cudaEventCreate");
        if (!stream) {
            check_cuda(make_stream(own_stream_), "cudaStreamCreate");
        }
        stream_ = stream.value_or(own_stream_.get());
    }

    [[nodiscard]] int device() const noexcept { return device_; }
    /// The stream of the collectives.
    [[nodiscard]] cudaStream_t stream() const noexcept { return stream_; }
    [[nodiscard]] cudaStream_t caller() const noexcept { return caller_; }
    cudaStream_t set_caller(cudaStream_t stream) noexcept { return std::exchange(caller_, stream); }

    /// Later work on the stream of the collectives runs after earlier work on `earlier`, a stream of
    /// this device, such as the caller's.
    /// @throws ContractViolation  it cannot be used.
    void order_after(cudaStream_t earlier) const {
        require_not_capturing(earlier);
        if (earlier != stream_) {
            check_stream(cudaEventRecord(ready_.get(), earlier), "cudaEventRecord");
            check_cuda(cudaStreamWaitEvent(stream_, ready_.get(), 0), "cudaStreamWaitEvent");
        }
    }
    /// Later work on a stream of the caller runs after the event.
    /// @throws ContractViolation  the stream cannot be used.
    void order_before(cudaEvent_t event, cudaStream_t stream) const {
        require_not_capturing(stream);
        check_stream(cudaStreamWaitEvent(stream, event, 0), "cudaStreamWaitEvent");
    }
    /// Whether the work on a stream of the caller has run.
    /// @throws ContractViolation  the stream cannot be used.
    [[nodiscard]] bool has_run(cudaStream_t stream) const {
        require_not_capturing(stream); // before the query, which would end a capture
        cudaError_t const found = cudaStreamQuery(stream);
        if (found == cudaErrorNotReady) {
            return false;
        }
        check_stream(found, "cudaStreamQuery");
        return true;
    }

private:
    static void require_not_capturing(cudaStream_t stream) {
        if (is_capturing(stream)) {
            throw ContractViolation{
                "the stream on which this communicator's data is made or used captures a CUDA graph, "
                "which cannot hold collectives, or is the default stream while another one captures: "
                "end the capture before them, or leave it to a CapturedStep"
            };
        }
    }
    /// Checks the result of a CUDA call on a stream of the caller.
    /// @throws ContractViolation  the stream is of another device. CUDA's behaviour with a
    ///                            destroyed stream is undefined.
    void check_stream(cudaError_t error, std::string_view call) const {
        if (error == cudaErrorInvalidResourceHandle) {
            throw ContractViolation{concat(
                "the stream on which data is made or used cannot be: ",
                call,
                " says ",
                cudaGetErrorString(error),
                "; give set_stream() one of device ",
                device_
            )};
        }
        check_cuda(error, call);
    }

    int device_ = -1;
    cudaStream_t caller_;
    CudaStream own_stream_;
    cudaStream_t stream_ = nullptr;
    CudaEvent ready_; ///< on another stream, after the data
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/nccl/options.hpp

namespace joinable { inline namespace v0 {

/// How an NCCL communicator behaves. The same on all ranks, except streams and devices.
struct NcclOptions {
    /// The stream on which the caller makes and uses data, until set_stream(). None: the legacy
    /// default stream, or the stream given to NcclCommunicatorRef.
    std::optional<cudaStream_t> stream = {};
    std::chrono::nanoseconds deadline = default_deadline; ///< of every wait of the host
    /// Before each collective, ranks compare over the control communicator what they are about to
    /// do, and all throw Mismatch if it differs. This finds mistakes; it costs a host round trip
    /// per collective.
    /// JOINABLE_CHECK=collectives turns it on, too. Ranks agree on it when they make a communicator.
    bool check = false;
    std::optional<int> device = {}; ///< made current; none: the current one is used
    ncclConfig_t config =
        NCCL_CONFIG_INITIALIZER; ///< for a handle that this library creates; `blocking` is ignored
};

}} // namespace joinable::v0

// ---- joinable/communicator/nccl/detail/rank.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// One rank of an NCCL communicator, with an engine's handle or its own, from start to end. It
/// coordinates its parts: a failure in one of them fails on all ranks, and ends all parts here.
/// Every host wait polls the events that can end it.
class NcclRank : public HasWorks {
public:
    NcclRank(std::unique_ptr<NcclControl> control, NcclOptions const& options)
        : control_{std::move(control)}, rank_{control_->rank()}, size_{control_->size()},
          deadline_{options.deadline, rank_, size_}, streams_{options.stream.value_or(nullptr)} {}
    NcclRank(NcclRank const&) = delete;
    NcclRank& operator=(NcclRank const&) = delete;

    [[nodiscard]] int rank() const noexcept { return rank_; }
    [[nodiscard]] int size() const noexcept { return size_; }
    [[nodiscard]] NcclControl& control() const noexcept { return *control_; }
    [[nodiscard]] int device() const noexcept { return streams_.device(); }
    [[nodiscard]] cudaStream_t stream() const noexcept { return streams_.stream(); }
    [[nodiscard]] cudaStream_t caller() const noexcept { return streams_.caller(); }
    cudaStream_t set_caller(cudaStream_t stream) noexcept { return streams_.set_caller(stream); }
    [[nodiscard]] ncclComm_t handle() const noexcept { return handle_.get(); }
    [[nodiscard]] std::chrono::nanoseconds deadline() const noexcept { return deadline_.length(); }
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) noexcept {
        return deadline_.set_length(deadline);
    }

    // -- the beginning and the end --------------------------------------------------------------------

    /// See NcclStreams::use_device. @throws CommunicationError  nothing is aborted.
    void use_device(std::optional<cudaStream_t> stream) { streams_.use_device(stream); }
    /// The handle must be alive until close(), or until a failure.
    void adopt(ncclComm_t comm) noexcept { handle_.adopt(comm); }
    void share_arrivals(Arena memory) noexcept { deadline_.share(std::move(memory)); }

    void add_holder(HoldsNcclKernels& holder) { handle_.add_holder(holder); }
    void remove_holder(HoldsNcclKernels& holder) noexcept { handle_.remove_holder(holder); }
    /// Call this before freeing anything that NCCL's kernels use.
    void release_kernels() noexcept { handle_.release_kernels(); }

    /// Collective. Waits for outstanding work on all ranks, then frees the handle if this rank owns
    /// it. Aborts when the deadline passes, or at once if `is_unwinding`. Returns a living handle
    /// that another object owns.
    ncclComm_t close(bool is_unwinding, bool owns_handle) noexcept {
        if (!is_here()) { // there neither CUDA nor NCCL works, and NCCL's sockets are the rank's
            return handle_.give_up();
        }
        CurrentCudaDevice const current{device(), std::nothrow};
        release_kernels();
        bool is_finalized = false;
        if (is_unwinding) {
            abort_for_exception(*this, "the scope of its communicator");
        }
        try {
            throw_if_aborted();
            wait_for_launch();
            if (owns_handle) {
                check(ncclCommFinalize(handle()), "ncclCommFinalize");
                finish_call("leaves the communicator");
            }
            // To the others, a rank that leaves the control communicator looks like one that
            // failed.
            over_control([](NcclControl& control) { control.barrier(); });
            is_finalized = true;
        } catch (...) { // NOLINT(bugprone-empty-catch): the failure has ended it on all ranks
        }
        if (owns_handle) {
            handle_.free(is_finalized, deadline());
        }
        return handle_.give_up();
    }

    // -- failures -------------------------------------------------------------------------------------

    [[nodiscard]] bool is_renumbered() const { return control_->is_renumbered(); }
    [[nodiscard]] bool is_aborted() const { return failure_ || control_->is_aborted(); }
    [[nodiscard]] std::optional<AbortReason> abort_reason() const {
        return failure_ ? failure_ : control_->abort_reason();
    }
    /// Ends this rank's part, if that has not happened yet. Outstanding work is lost. The control
    /// communicator tells the others; there the first reason wins. In a forked process only its copy
    /// ends.
    void abort(AbortReason const& reason) noexcept {
        if (failure_) {
            return;
        }
        if (!is_here()) {
            failure_ = reason;
            static_cast<void>(handle_.give_up());
            return;
        }
        try {
            control_->abort(reason);
            failure_ = control_->abort_reason().value_or(reason);
        } catch (...) {
            failure_ = reason_of(std::current_exception());
        }
        CurrentCudaDevice const current{device(), std::nothrow};
        release_kernels();
        launches_.lose();
        if (ncclResult_t const result = handle_.abort(deadline()); result != ncclSuccess) {
            add_to_failure("ncclCommAbort", result);
        }
    }
    [[noreturn]] void fail(AbortReason const& reason) {
        abort(reason);
        throw_failure(*failure_);
    }
    void throw_if_aborted(std::string_view error = asynchronous_error) {
        poll(error);
        if (failure_) {
            throw_failure(*failure_);
        }
    }

    /// @throws CommunicationError, PeerFailed  the call failed; after aborting.
    void check(ncclResult_t result, std::string_view call) {
        if (is_error(result)) {
            if (result == ncclRemoteError) {
                wait_for_culprit();
            }
            fail(
                {result == ncclRemoteError ? FailureKind::peer_failed : FailureKind::communication,
                 {},
                 concat("rank ", rank(), ": ", call, ": ", nccl_text(result, handle()))}
            );
        }
    }
    /// The same for a call of CUDA.
    void check(cudaError_t error, std::string_view call) {
        if (error != cudaSuccess) {
            fail_on_error([&] { check_cuda(error, call); });
        }
    }
    /// Runs f(), which calls CUDA or NCCL on this rank's device. All such calls go through here, but
    /// those at this rank's end.
    /// @throws CommunicationError  a call failed; after aborting.
    template <class F>
    std::invoke_result_t<F const&> on_device(F const& f) {
        return fail_on_error([&]() -> std::invoke_result_t<F const&> {
            CurrentCudaDevice const current{device(), std::nothrow}; // else f() fails
            return f();
        });
    }
    /// Call this before anything that may ask for work that is not complete, but where a rank, a work
    /// or memory ends, which an error of the engine must not keep from waiting.
    /// @throws ContractViolation  see require_no_cuda_error(); or a process that the rank has forked calls.
    void require_no_error() const {
        HasWorks::require_here(rank_);
        if (!failure_) {
            require_no_cuda_error();
        }
    }
    /// For works.
    void require_here(int) const { require_no_error(); }
    /// @throws ContractViolation  it is not this device's memory.
    void check_memory(ConstBuffer buffer) {
        if (buffer.count != 0) {
            cudaPointerAttributes found{};
            on_device([&] {
                check_cuda(
                    cudaPointerGetAttributes(&found, buffer.data), "cudaPointerGetAttributes"
                );
            });
            check_device_memory(buffer, found, device());
        }
    }

    /// Runs f(control) with this rank's deadline. An exception from it ends this rank, too.
    template <class F>
    void over_control(F const& f) {
        throw_if_aborted();
        auto const before = control_->exchange_deadline(deadline());
        try {
            f(*control_);
        } catch (...) {
            abort(reason_of(std::current_exception()));
        }
        if (before) {
            control_->exchange_deadline(*before);
        }
        if (failure_) {
            throw_failure(*failure_);
        }
    }

    // -- calls of NCCL --------------------------------------------------------------------------------

    /// Call this before an NCCL call that is not a collective.
    void begin_call() {
        begin();
        launches_.require_no_group();
        wait_for_launch();
    }
    /// Waits until NCCL has finished the last call on the handle; `doing` describes that call. Most
    /// errors of NCCL show up only here, not in the call's result.
    void finish_call(std::string_view doing) {
        auto const is_done = [&] { return handle_.state() == ncclSuccess; };
        wait_until(is_done, doing, 0, concat(asynchronous_error, " while it ", doing));
    }
    /// Submits one NCCL call by `call()`, named `name`, whose result NCCL writes to `place`, and waits
    /// until NCCL has finished it. NCCL still writes there while an abort outlasts the deadline, so the
    /// place lives until forget() or until NCCL has ended the handle.
    template <class Call>
    void finish_into(
        std::shared_ptr<void> place, std::string_view name, std::string_view doing, Call const& call
    ) {
        handle_.keep(std::move(place));
        on_device([&] { check(call(), name); });
        finish_call(doing);
    }
    void forget(void const* place) noexcept { handle_.forget(place); }

    /// Submits NCCL calls by `issue()`, after the work on the stream `after`, such as the caller's.
    /// `collectives` is the number of collectives among them; messages do not count. Blocks only
    /// until NCCL has launched the previous submission.
    /// @throws ContractViolation  the stream cannot be used; nothing was submitted.
    template <class Issue>
    [[nodiscard]] NcclLaunch&
    post(std::uint64_t collectives, cudaStream_t after, Issue const& issue) {
        begin();
        return on_device([&]() -> NcclLaunch& {
            wait_for_launch(); // does nothing in a group
            streams_.order_after(after);
            NcclLaunch& launch = launches_.take();
            try {
                issue();
            } catch (...) {
                launches_.give_back(launch);
                throw;
            }
            launches_.count(launch, collectives);
            if (collectives != 0) {
                deadline_.arrive(launch.number);
            }
            if (!has_group()) {
                hand_over(launch);
            }
            return launch;
        });
    }

    [[nodiscard]] bool has_group() const noexcept { return launches_.has_group(); }
    /// Collects calls from here on; end_group() submits them together. Returns their launch.
    [[nodiscard]] NcclLaunch& begin_group() {
        begin_call();
        return on_device([&]() -> NcclLaunch& {
            NcclLaunch& launch = launches_.take();
            check(ncclGroupStart(), "ncclGroupStart");
            launches_.begin_group(launch);
            return launch;
        });
    }
    void end_group() {
        on_device([&] {
            NcclLaunch& launch = launches_.end_group();
            check(ncclGroupEnd(), "ncclGroupEnd");
            hand_over(launch);
        });
    }

    // -- launches -------------------------------------------------------------------------------------

    void release(NcclLaunch& launch) noexcept { --launch.users; }
    void release(NcclAwaited const& awaited) noexcept { release(*awaited.launch); }

    /// Makes `stream` wait for the launch. The host waits only until NCCL has launched it.
    void order_before(NcclLaunch& launch, cudaStream_t stream) {
        on_device([&] {
            wait_for_launch(launch);
            if (!has_run(launch)) {
                streams_.order_before(launch.done.get(), stream);
            }
        });
    }
    void order_before(NcclAwaited& awaited, cudaStream_t stream) {
        order_before(*awaited.launch, stream);
        awaited.is_in_order = true;
    }
    [[nodiscard]] static bool is_done(NcclAwaited const& awaited) noexcept {
        return awaited.is_in_order || awaited.launch->is_final();
    }
    /// Whether the results are final. Does not wait.
    [[nodiscard]] bool progress(NcclAwaited const& awaited) {
        NcclLaunch& launch = *awaited.launch;
        launch.require_posted();
        return on_device([&] {
            return (launch.state != NcclLaunch::State::posted || try_launch()) && has_run(launch);
        });
    }
    /// The same with a deadline, unless all ranks are known to have posted it.
    [[nodiscard]] bool test(NcclAwaited& awaited) {
        if (progress(awaited)) {
            return true;
        }
        std::uint64_t const number = awaited.launch->number;
        awaited.polled.extend_when_reached(deadline(), WaitClock::gap_of_tests, [&] {
            return deadline_.may_be_missing(number) ? more_time("waits for a collective", number)
                                                    : std::nullopt;
        });
        return false;
    }
    void finish(NcclAwaited const& awaited) { synchronize(*awaited.launch); }
    /// Blocks the host until the launch has run.
    void synchronize(NcclLaunch& launch) {
        wait_for_launch(launch);
        wait_until([&] { return has_run(launch); }, "waits for a collective", launch.number);
    }
    /// Blocks the host until everything that was posted has run.
    void finish_launches() {
        wait_for_launch();
        launches_.for_each_unfinished([&](NcclLaunch& launch) { synchronize(launch); });
    }
    /// Blocks the host until the work on a stream of the caller has run.
    void wait_for(cudaStream_t stream) {
        wait_until([&] { return streams_.has_run(stream); }, "waits for a stream");
    }
    /// Blocks the host until `ready()`, which calls CUDA, and throws if it will never be true. `doing`
    /// describes the wait. `number` is that of the collective that it is for; 0: none. `error` names an
    /// error of NCCL.
    /// @throws TimedOut  after aborting.
    template <class Ready>
    void wait_until(
        Ready const& ready,
        std::string_view doing,
        std::uint64_t number = 0,
        std::string_view error = asynchronous_error
    ) {
        poll_until(ready, [&] { throw_if_aborted(error); }, doing, number);
    }
    /// The same for an end that needs no other rank, so a failure elsewhere does not prevent it.
    template <class Ready>
    void wait_here(Ready const& ready, std::string_view doing) {
        poll_until(ready, [] {}, doing, 0);
    }
    /// Blocks the host until everything that was posted, and the work on the caller's stream, has
    /// run.
    void synchronize() {
        finish_launches();
        wait_for(caller());
    }
    /// Whether everything that was posted has run. Does not wait or throw.
    [[nodiscard]] bool is_idle() const noexcept {
        CurrentCudaDevice const current{device(), std::nothrow};
        return launches_.is_idle();
    }

    /// Returns whether ranks that wait can learn of it.
    bool renew_deadline() {
        HasWorks::require_here(rank_);
        deadline_.keep_alive();
        return control_->keep_alive() || deadline_.is_shared();
    }
    /// See NcclCollectives::keep_alive.
    void keep_alive() {
        if (!renew_deadline()) {
            throw ContractViolation{
                "keep_alive() reaches the ranks that wait through the control communicator, but "
                "that models neither RenewsDeadline nor SharesMemory: use one that does"
            };
        }
    }
    /// The ranks that have not posted this rank's oldest unfinished collective, as far as known.
    [[nodiscard]] std::vector<int> missing_ranks() const {
        CurrentCudaDevice const current{device(), std::nothrow};
        std::uint64_t const oldest = launches_.oldest_unfinished();
        return oldest == 0 ? std::vector<int>{} : deadline_.missing(oldest);
    }

private:
    static constexpr std::string_view asynchronous_error = "an asynchronous error";

    /// Runs f(). @throws CommunicationError  f() threw it; after aborting.
    template <class F>
    std::invoke_result_t<F const&> fail_on_error(F const& f) {
        try {
            return f();
        } catch (CommunicationError const& error) {
            fail({FailureKind::communication, {}, concat("rank ", rank(), ": ", error.what())});
        }
    }
    /// Adds an error during the rank's end to the failure that caused it.
    void add_to_failure(std::string_view call, ncclResult_t result) noexcept {
        try {
            failure_->message += concat(
                "; besides, ", call, " failed on rank ", rank_, ": ", ncclGetErrorString(result)
            );
        } catch (...) { // NOLINT(bugprone-empty-catch): no memory, and the reason is known
        }
    }
    /// The network may notice that a process has died before the control communicator does, which
    /// alone knows its rank.
    void wait_for_culprit() const {
        constexpr std::chrono::nanoseconds patience = std::chrono::seconds{2};
        auto const is_known = [this] { return size_ == 1 || control_->is_aborted(); };
        wait_at_most((std::min)(patience, deadline()), is_known, [] {
            std::this_thread::sleep_for(std::chrono::microseconds{50});
        });
    }
    /// Takes over failures of other ranks and asynchronous errors of NCCL.
    void poll(std::string_view error = asynchronous_error) noexcept {
        if (failure_) {
            return;
        }
        try {
            if (control_->is_aborted()) {
                abort(
                    {FailureKind::communication,
                     {},
                     "another rank aborted, and the control communicator does not tell why: use one "
                     "that models TellsReason"}
                );
            } else {
                check(handle_.state(), error);
            }
        } catch (...) { // NOLINT(bugprone-empty-catch): failure_ has it
        }
    }

    template <class Ready, class Poll>
    void
    poll_until(Ready const& ready, Poll const& poll, std::string_view doing, std::uint64_t number) {
        // NCCL takes 80 us to launch a collective of a handle that does not block (2.28.9, an H200).
        constexpr std::chrono::microseconds spin{300};
        constexpr std::chrono::microseconds nap{50};
        auto const begun = NcclDeadline::Clock::now();
        auto const pause = [&] {
            if (NcclDeadline::Clock::now() - begun < spin) {
                std::this_thread::yield();
            } else {
                std::this_thread::sleep_for(nap);
            }
        };
        auto const is_over = [&] { return ready() || (poll(), false); };
        on_device([&] {
            detail::wait_until(deadline(), is_over, pause, [&] {
                return more_time(doing, number);
            });
        });
    }
    [[nodiscard]] std::optional<std::chrono::nanoseconds>
    more_time(std::string_view doing, std::uint64_t number) {
        return deadline_.more_time(doing, number, [this](AbortReason const& why) { fail(why); });
    }

    /// Call this before any NCCL call.
    void begin() {
        HasWorks::require_here(rank_);
        throw_if_aborted();
        require_no_error();
        launches_.require_no_other_group();
    }
    void hand_over(NcclLaunch& launch) {
        launches_.hand_over(launch);
        static_cast<void>(try_launch());
    }
    /// Records the event after the last submission, if NCCL has put that on the stream. Within
    /// on_device().
    bool try_launch() {
        if (launches_.launching() != nullptr) {
            throw_if_aborted();
            if (handle_.state() != ncclSuccess) {
                return false;
            }
            launches_.record(stream());
        }
        return true;
    }
    /// Waits until NCCL has launched the last submission.
    void wait_for_launch() {
        if (NcclLaunch const* const launch = launches_.launching()) {
            auto const is_launched = [&] { return try_launch(); };
            wait_until(is_launched, "waits for NCCL to launch a collective", launch->number);
        }
    }
    void wait_for_launch(NcclLaunch const& launch) {
        launch.require_posted();
        if (launch.state == NcclLaunch::State::posted) {
            wait_for_launch();
        }
    }
    /// Whether the results are final.
    /// @throws the error that ended this rank, if they never will be.
    [[nodiscard]] bool has_run(NcclLaunch& launch) {
        check(launch.poll(), "cudaEventQuery");
        if (launch.state == NcclLaunch::State::launched) {
            poll();
        }
        if (launch.state == NcclLaunch::State::lost) {
            throw_failure(*failure_);
        }
        return launch.state == NcclLaunch::State::complete;
    }

    std::unique_ptr<NcclControl> control_;
    int rank_;
    int size_;
    std::optional<AbortReason> failure_; ///< all members throw it from now on
    NcclDeadline deadline_;
    NcclStreams streams_;
    NcclLaunches launches_;
    NcclHandle handle_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/nccl/detail/registration.hpp

/// @file
/// NCCL's memory and its registration. They are newer than everything else used here: ncclMemAlloc
/// and ncclCommRegister came with NCCL 2.19, ncclCommWindowRegister with 2.27. Template arguments
/// delay their lookup to the calls, so that this compiles with older headers.

namespace joinable { inline namespace v0 { namespace detail {

/// NCCL_WIN_COLL_SYMMETRIC, which older headers lack: in each collective, all ranks use the same
/// offset from the start of their windows.
inline constexpr int symmetric_window = 0x01;
/// NCCL_WIN_REQUIRED_ALIGNMENT: the alignment of a window's start, in bytes.
inline constexpr std::size_t window_alignment = 4096;

/// A place for a pointer that NCCL writes, of a type that older headers do not name.
struct NcclPointerSlot {
    void** place;
    template <class T>
    operator T**() const noexcept { // NOLINT(google-explicit-constructor)
        return reinterpret_cast<T**>(place);
    }
};
struct NcclPointer {
    void* pointer;
    template <class T>
    operator T*() const noexcept { // NOLINT(google-explicit-constructor)
        return static_cast<T*>(pointer);
    }
};

template <class Data>
concept nccl_allocates = requires(Data** data, std::size_t bytes) { ncclMemAlloc(data, bytes); };
template <class Handle>
concept nccl_has_windows =
    requires(Handle comm, void* data, std::size_t bytes, NcclPointerSlot made) {
        ncclCommWindowRegister(comm, data, bytes, made, symmetric_window);
    };
template <class Handle>
concept nccl_registers =
    requires(Handle comm, void* data, std::size_t bytes, NcclPointerSlot made) {
        ncclCommRegister(comm, data, bytes, made);
    };

template <class Handle>
inline constexpr bool nccl_can_register = nccl_has_windows<Handle> || nccl_registers<Handle>;

/// Allocates memory of the current device. `Data` is void.
template <class Data>
[[nodiscard]] ncclResult_t
nccl_allocate([[maybe_unused]] Data** data, [[maybe_unused]] std::size_t bytes) {
    if constexpr (nccl_allocates<Data>) {
        return ncclMemAlloc(data, bytes);
    } else {
        return ncclInvalidUsage;
    }
}
template <class Data>
void nccl_free([[maybe_unused]] Data* data) noexcept {
    if constexpr (nccl_allocates<Data>) {
        static_cast<void>(ncclMemFree(data));
    }
}

/// Registers memory that NCCL has allocated, as a window if the header has windows. Collective.
/// With a non-blocking communicator, the result is at `made` once NCCL reports success; `made` must
/// stay in place. The result is null if this system does not support registration.
template <class Handle>
[[nodiscard]] ncclResult_t nccl_register(
    [[maybe_unused]] Handle comm,
    [[maybe_unused]] void* data,
    [[maybe_unused]] std::size_t bytes,
    [[maybe_unused]] void** made
) {
    if constexpr (nccl_has_windows<Handle>) {
        return ncclCommWindowRegister(comm, data, bytes, NcclPointerSlot{made}, symmetric_window);
    } else if constexpr (nccl_registers<Handle>) {
        return ncclCommRegister(comm, data, bytes, NcclPointerSlot{made});
    } else {
        return ncclInvalidUsage;
    }
}
/// Local: NCCL removes its own rank's mappings without asking other ranks. Nothing may use the
/// memory any more. `made` is not null.
template <class Handle>
void nccl_deregister([[maybe_unused]] Handle comm, [[maybe_unused]] void* made) noexcept {
    if constexpr (nccl_has_windows<Handle>) {
        static_cast<void>(ncclCommWindowDeregister(comm, NcclPointer{made}));
    } else if constexpr (nccl_registers<Handle>) {
        static_cast<void>(ncclCommDeregister(comm, NcclPointer{made}));
    }
}

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/nccl/detail/arenas.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The arenas of one rank in memory from NCCL's allocator, and their registration. Arenas may
/// outlive this object and the handle. They are deregistered while the handle lives, or end with
/// it.
class NcclArenas {
public:
    explicit NcclArenas(NcclRank& rank) noexcept : rank_{rank} {}
    NcclArenas(NcclArenas const&) = delete;
    NcclArenas& operator=(NcclArenas const&) = delete;
    ~NcclArenas() {
        for (Segment* const segment : segments_) {
            segment->owner = nullptr;
        }
    }

    /// Local. Zeroed; an empty arena if NCCL has no memory.
    [[nodiscard]] Arena allocate(std::size_t bytes, std::size_t alignment) {
        check_alignment(alignment);
        constexpr std::size_t given = 256; // like cudaMalloc, which NCCL may call
        std::size_t const aligned = (std::max)(alignment, window_alignment);
        auto const segment = std::make_shared<Segment>(rank_.device(), rank_.deadline());
        std::size_t space = bytes + aligned - given;
        void* block = nullptr;
        if (space < bytes ||
            is_error(rank_.on_device([&] { return nccl_allocate(&block, space); }))) {
            return {};
        }
        segment->data = segment->block = block;
        std::align(aligned, bytes, segment->data, space);
        segments_.push_back(segment.get());
        segment->owner = this;
        segment->of_arena = segment;
        auto* const data = static_cast<std::byte*>(segment->data);
        Arena arena{data, bytes, &release, segment.get()};
        CudaStream own; // the caller's may wait for a collective of other ranks, or capture a graph
        rank_.on_device([&] {
            check_cuda(make_stream(own), "cudaStreamCreateWithFlags");
            check_cuda(cudaMemsetAsync(data, 0, bytes, own.get()), "cudaMemsetAsync");
        });
        rank_.wait_for(own.get());
        return arena;
    }

    /// See NcclCollectives::register_arena.
    [[nodiscard]] bool register_arena(Arena const& arena) {
        rank_.begin_call();
        Segment* const segment = find(arena);
        if (segment != nullptr && segment->registration != nullptr) {
            return true;
        }
        check_same_size(gather(arena.bytes()), rank_.is_renumbered(), "register arenas");
        if (!all_ranks_have(nccl_can_register<ncclComm_t> && segment != nullptr)) {
            return false;
        }
        auto const start = [&] {
            return nccl_register(
                rank_.handle(), arena.data(), arena.bytes(), &segment->registration
            );
        };
        rank_.finish_into(
            segment->of_arena, "the registration of an arena", "registers an arena", start
        );
        if (!all_ranks_have(segment->registration != nullptr)) {
            deregister(*segment);
            return false;
        }
        return true;
    }

    /// Call this before the handle ends or returns to its owner. Waits for outstanding work up to
    /// the deadline, and has graphs release NCCL's kernels, because these may use registered
    /// memory.
    void deregister_all() noexcept {
        auto const is_registered = [](Segment* segment) {
            return segment->registration != nullptr;
        };
        bool const is_alive = rank_.handle() != nullptr; // else NCCL may still write registrations
        if (is_alive && std::any_of(segments_.begin(), segments_.end(), is_registered) &&
            finish()) {
            rank_.release_kernels();
            for (Segment* const segment : segments_) {
                deregister(*segment);
            }
        }
    }

private:
    /// The memory of an arena. The arena owns it, and while NCCL uses it the handle, too.
    struct Segment {
        Segment(int device_of_rank, std::chrono::nanoseconds time) noexcept
            : device{device_of_rank}, deadline{time} {}
        Segment(Segment const&) = delete;
        Segment& operator=(Segment const&) = delete;
        /// Unlike cudaFree, freeing mapped memory does not wait for work that uses it. The wait here ends
        /// at the deadline: see give_back(). In a forked process the memory is the rank's.
        ~Segment() {
            if (block != nullptr && home.is_here()) {
                joinable::detail::give_back(device, deadline, [block = block] {
                    wait_for_cuda_device();
                    nccl_free(block);
                });
            }
        }

        int device;
        std::chrono::nanoseconds deadline;
        std::shared_ptr<Segment> of_arena; ///< null: the arena has gone
        NcclArenas* owner = nullptr;       ///< null: it was destroyed
        void* block = nullptr;             ///< from NCCL's allocator
        void* data = nullptr;
        void* registration = nullptr; ///< null: none. NCCL may write it until the handle has ended.
        Unwinding unwinding;
        HomeProcess home;
    };

    [[nodiscard]] Segment* find(Arena const& arena) const noexcept {
        auto const found = std::find_if(segments_.begin(), segments_.end(), [&](Segment* segment) {
            return segment->data == arena.data();
        });
        return found == segments_.end() ? nullptr : *found;
    }

    /// The values of all ranks, by rank. Collective over the control communicator.
    [[nodiscard]] std::vector<std::uint64_t> gather(std::uint64_t mine) {
        std::vector<std::uint64_t> all;
        rank_.over_control([&](NcclControl& control) { all = control.gather({&mine, 1}); });
        return all;
    }
    [[nodiscard]] bool all_ranks_have(bool mine) {
        auto const all = gather(mine ? 1 : 0);
        return std::count(all.begin(), all.end(), 1U) == rank_.size();
    }

    /// Whether all work is complete and the handle lives.
    [[nodiscard]] bool finish() noexcept {
        try {
            rank_.throw_if_aborted();
            rank_.finish_launches();
            return rank_.handle() != nullptr;
        } catch (...) { // all ranks and their work have ended
            return false;
        }
    }
    void deregister(Segment& segment) noexcept {
        if (segment.registration != nullptr) {
            CurrentCudaDevice const current{rank_.device(), std::nothrow};
            nccl_deregister(rank_.handle(), segment.registration);
            segment.registration = nullptr;
        }
        rank_.forget(&segment);
    }

    void take_back(Segment& segment) noexcept {
        if (rank_.is_here() && rank_.handle() != nullptr) {
            if (segment.unwinding.has_begun() && !rank_.is_idle()) {
                abort_for_exception(rank_, "the scope of an arena"); // no later wait may come
            }
            if (finish()) {
                deregister(segment);
            }
        }
        std::erase(segments_, &segment);
    }
    static void release(void* context, std::byte*, std::size_t) noexcept {
        std::shared_ptr<Segment> const segment =
            std::move(static_cast<Segment*>(context)->of_arena);
        if (segment->owner != nullptr) {
            segment->owner->take_back(*segment);
        }
    }

    NcclRank& rank_;
    std::vector<Segment*> segments_; ///< of living arenas
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/nccl/detail/calls.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The bytes of a number. A dtype uses as many as it has.
using NcclScalar = std::array<std::byte, 8>;

/// `value` rounded to a floating-point dtype.
[[nodiscard]] inline NcclScalar nccl_scalar(DType dtype, double value) {
    NcclScalar scalar{};
    visit_floating(dtype, [&]<class T>(std::type_identity<T>) {
        if constexpr (sizeof(T) == 2) {
            T const rounded{static_cast<float>(value)};
            std::memcpy(&scalar, &rounded, sizeof(T));
        } else {
            auto const rounded = static_cast<T>(value);
            std::memcpy(&scalar, &rounded, sizeof(T));
        }
    });
    return scalar;
}

/// A sum that multiplies each rank's buffer by that rank's factor. NCCL reads the factor during
/// construction. The object is not needed after the function that takes it has returned.
class NcclScaledSum {
public:
    /// The factor is rounded to the dtype, a floating-point one. NCCL must have launched all
    /// earlier calls.
    NcclScaledSum(ncclComm_t comm, DType dtype, double factor) : comm_{comm} {
        NcclScalar scalar = nccl_scalar(dtype, factor);
        result_ = ncclRedOpCreatePreMulSum(
            &op_, scalar.data(), nccl_type(dtype), ncclScalarHostImmediate, comm
        );
    }
    /// NCCL reads the factor from device memory each time the collective runs.
    NcclScaledSum(ncclComm_t comm, DType dtype, void* factor) : comm_{comm} {
        result_ = ncclRedOpCreatePreMulSum(&op_, factor, nccl_type(dtype), ncclScalarDevice, comm);
    }
    NcclScaledSum(NcclScaledSum const&) = delete;
    NcclScaledSum& operator=(NcclScaledSum const&) = delete;
    ~NcclScaledSum() {
        if (result_ == ncclSuccess) {
            static_cast<void>(ncclRedOpDestroy(op_, comm_));
        }
    }

    /// Whether NCCL has made the operation.
    [[nodiscard]] ncclResult_t result() const noexcept { return result_; }
    [[nodiscard]] ncclRedOp_t op() const noexcept { return op_; }

private:
    ncclComm_t comm_;
    ncclRedOp_t op_ = ncclSum;
    ncclResult_t result_;
};

/// Collectives as NCCL calls on one handle and one stream. Each member returns the worst result of
/// its calls.
class NcclCalls {
public:
    NcclCalls(ncclComm_t comm, cudaStream_t stream, int size) noexcept
        : comm_{comm}, stream_{stream}, size_{size} {}

    /// @pre the request is not a barrier, which NCCL lacks, and NCCL has its operation.
    [[nodiscard]] ncclResult_t collective(Request const& request) const {
        Descriptor const& signature = request.signature;
        void const* const in = request.in.data;
        void* const out = request.out.data;
        std::size_t const count = signature.count * reals_in(signature.dtype);
        ncclDataType_t const type = nccl_type(signature.dtype);
        switch (signature.collective) {
        case Collective::all_reduce:
            return ncclAllReduce(
                in, out, count, type, nccl_op(signature.dtype, signature.op), comm_, stream_
            );
        case Collective::scaled_all_reduce: return scaled_all_reduce(request.out, signature.factor);
        case Collective::reduce: {
            void* const data = const_cast<void*>(in); // in place; only the root writes
            ncclRedOp_t const op = nccl_op(signature.dtype, signature.op);
            return ncclReduce(data, data, count, type, op, signature.root, comm_, stream_);
        }
        case Collective::broadcast: // in place; the root only reads
            return ncclBroadcast(out, out, count, type, signature.root, comm_, stream_);
        case Collective::all_gather:
            return signature.has_counts ? exchange(request, Sends::same)
                                        : ncclAllGather(in, out, count, type, comm_, stream_);
        case Collective::reduce_scatter:
            return reduce_parts(request, nccl_op(signature.dtype, signature.op));
        case Collective::scaled_reduce_scatter: {
            NcclScaledSum const sum{comm_, real_of(signature.dtype), signature.factor};
            return sum.result() != ncclSuccess ? sum.result()
                   : size_ == 1                ? scale_alone(in, as_reals(request.out), sum.op())
                                               : reduce_parts(request, sum.op());
        }
        case Collective::gather: return exchange(request, Sends::same);
        default: return exchange(request, Sends::parts);
        }
    }

    /// The factor is a number, or the address in device memory at which it will be.
    template <class Factor>
    [[nodiscard]] ncclResult_t scaled_all_reduce(Buffer elements, Factor factor) const {
        Buffer const buffer = as_reals(elements);
        NcclScaledSum const sum{comm_, buffer.dtype, factor};
        ncclDataType_t const type = nccl_type(buffer.dtype);
        return sum.result() != ncclSuccess ? sum.result()
               : size_ == 1
                   ? scale_alone(buffer.data, buffer, sum.op())
                   : ncclAllReduce(
                         buffer.data, buffer.data, buffer.count, type, sum.op(), comm_, stream_
                     );
    }

    [[nodiscard]] ncclResult_t send(ConstBuffer buffer, int to) const {
        std::size_t const count = buffer.count * reals_in(buffer.dtype);
        return ncclSend(buffer.data, count, nccl_type(buffer.dtype), to, comm_, stream_);
    }
    [[nodiscard]] ncclResult_t receive(Buffer buffer, int from) const {
        std::size_t const count = buffer.count * reals_in(buffer.dtype);
        return ncclRecv(buffer.data, count, nccl_type(buffer.dtype), from, comm_, stream_);
    }

private:
    /// A scaled sum of one rank. NCCL 2.19 to 2.29.6 cut it for at most 32 blocks, one for each 16 KiB,
    /// and lose elements at the end unless all blocks get the same number (nccl #1950). So a second
    /// call takes what exceeds a multiple of 16 KiB.
    [[nodiscard]] ncclResult_t scale_alone(void const* in, Buffer out, ncclRedOp_t op) const {
        std::size_t const rest = out.count % ((std::size_t{16} << 10U) / size_of(out.dtype));
        auto const scale = [&](std::size_t begin, std::size_t count) {
            std::size_t const offset = begin * size_of(out.dtype);
            return ncclAllReduce(
                static_cast<std::byte const*>(in) + offset,
                static_cast<std::byte*>(out.data) + offset,
                count,
                nccl_type(out.dtype),
                op,
                comm_,
                stream_
            );
        };
        std::size_t const even = out.count - rest;
        ncclResult_t const result = even == 0 ? ncclSuccess : scale(0, even);
        return rest == 0 || is_error(result) ? result : scale(even, rest);
    }

    /// Whether a rank sends each rank its own part, or the same data.
    enum class Sends : bool { parts, same };

    /// Runs `call(rank)` for each rank, in one NCCL group.
    template <class Call>
    [[nodiscard]] ncclResult_t for_each_rank(Call const& call) const {
        ncclResult_t worst = ncclGroupStart();
        auto const note = [&](ncclResult_t result) {
            if (is_error(result) && !is_error(worst)) {
                worst = result;
            }
        };
        for (int rank = 0; rank < size_; ++rank) {
            call(rank, note);
        }
        note(ncclGroupEnd());
        return worst;
    }

    /// A message to each rank and one from each rank.
    [[nodiscard]] ncclResult_t exchange(Request const& request, Sends what) const {
        std::size_t const element = size_of(real_of(request.signature.dtype));
        std::size_t const reals = reals_in(request.signature.dtype);
        ncclDataType_t const type = nccl_type(request.signature.dtype);
        auto const* from = static_cast<std::byte const*>(request.in.data);
        auto* to = static_cast<std::byte*>(request.out.data);
        return for_each_rank([&](int peer, auto const& note) {
            std::size_t const sent = reals * request.sends[peer];
            std::size_t const expected = reals * request.expects[peer];
            if (sent != 0) {
                note(ncclSend(from, sent, type, peer, comm_, stream_));
            }
            if (expected != 0) {
                note(ncclRecv(to, expected, type, peer, comm_, stream_));
            }
            from += what == Sends::parts ? sent * element : 0;
            to += expected * element;
        });
    }
    /// A reduction to each rank. NCCL's own needs equal parts.
    [[nodiscard]] ncclResult_t reduce_parts(Request const& request, ncclRedOp_t op) const {
        Descriptor const& signature = request.signature;
        auto const* part = static_cast<std::byte const*>(request.in.data);
        if (!signature.has_counts) {
            void* const out = request.out.data;
            ncclDataType_t const type = nccl_type(signature.dtype);
            std::size_t const count = signature.count * reals_in(signature.dtype);
            return ncclReduceScatter(part, out, count, type, op, comm_, stream_);
        }
        return for_each_rank([&](int root, auto const& note) {
            if (std::size_t const count = request.sends[root]; count != 0) {
                note(ncclReduce(
                    part,
                    request.out.data,
                    count * reals_in(signature.dtype),
                    nccl_type(signature.dtype),
                    op,
                    root,
                    comm_,
                    stream_
                ));
                part += count * size_of(signature.dtype);
            }
        });
    }

    ncclComm_t comm_;
    cudaStream_t stream_;
    int size_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/nccl/detail/device.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The device of a rank, on the caller's stream. The host waits for it as for a collective: the deadline,
/// an error of NCCL or an abort of any rank ends the wait.
class NcclDevice final : public CudaDevice {
public:
    explicit NcclDevice(NcclRank& rank) noexcept
        : CudaDevice{rank.device(), rank.caller(), rank.caller()}, rank_{rank} {
        set_deadline(rank.deadline());
    }

private:
    void wait_for_stream() override {
        rank_.require_no_error();
        rank_.wait_for(stream());
    }

    NcclRank& rank_;
};

}}} // namespace joinable::v0::detail

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

// ---- joinable/communicator/nccl/detail/post.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// Compares the calls that all ranks are about to make. Collective over the control communicator;
/// blocks.
/// @throws Mismatch  on all ranks, after aborting.
inline void agree_on_collective(NcclRank& rank, Request const& mine) {
    std::optional<AbortReason> reason;
    rank.over_control([&](NcclControl& control) {
        Comparison comparison;
        comparison.begin(mine.signature, control.rank(), control.size());
        do {
            control.sum(comparison.words());
            reason = comparison.difference();
        } while (!reason && comparison.go_on(mine.sends, mine.expects));
    });
    if (reason) {
        rank.fail(*reason);
    }
}

/// Submits calls of NCCL after the work on the stream `after`. `collectives` is the number of
/// collectives among them.
template <class Call>
[[nodiscard]] NcclAwaited post_calls(
    NcclRank& rank,
    std::uint64_t collectives,
    std::string_view what,
    cudaStream_t after,
    Call const& call
) {
    return {&rank.post(collectives, after, [&] {
        rank.check(call(NcclCalls{rank.handle(), rank.stream(), rank.size()}), what);
    })};
}

/// Starts a collective after the work on the stream `after`. With `checks` ranks compare it first.
/// @throws ContractViolation  see NcclCollectives; nothing was submitted.
[[nodiscard]] inline NcclAwaited
post_collective(NcclRank& rank, Request const& request, bool checks, cudaStream_t after) {
    Descriptor const& signature = request.signature;
    rank.check_memory(request.in);
    if (request.out.data != request.in.data || request.out.count != request.in.count) {
        rank.check_memory(request.out);
    }
    if (signature.is_reduction()) {
        static_cast<void>(nccl_op(signature.dtype, signature.op)); // throws where NCCL has none
    }
    if (checks) {
        agree_on_collective(rank, request);
    }
    return post_calls(rank, 1, name_of(signature.collective), after, [&](NcclCalls const& nccl) {
        return nccl.collective(request);
    });
}

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/nccl/work.hpp

namespace joinable { inline namespace v0 {

/// A collective or a message on the stream of an NCCL communicator, which must outlive it.
///
/// wait() orders a stream after it; the host continues. Destroying it without a wait blocks the
/// host up to the deadline; during unwinding it aborts. After a wait, buffers may be freed in the
/// order of the stream that waits (cudaFreeAsync). test() and progress() say whether the results are
/// final.
class [[nodiscard("destroying the work waits for it: wait() where it is needed")]] NcclWork
    : public detail::WorkOf<detail::NcclRank, detail::NcclAwaited> {
public:
    using WorkOf::WorkOf;

    /// Later work on the caller's stream runs after the collective. The host waits only until NCCL
    /// has launched it.
    /// @throws TimedOut, PeerFailed, CommunicationError, ...  the reason why the communicator
    ///         ended, unless the results were final before; ContractViolation  its group is still
    ///         open.
    void wait() {
        checked([](detail::NcclRank& rank, detail::NcclAwaited& awaited) {
            rank.order_before(awaited, rank.caller());
        });
    }
    /// The same for another stream than the communicator's caller stream.
    void wait(cudaStream_t stream) {
        checked([&](detail::NcclRank& rank, detail::NcclAwaited& awaited) {
            rank.order_before(awaited, stream);
        });
    }
    /// Blocks the host until the results are final, up to the deadline.
    /// @throws as wait() does.
    void synchronize() { WorkOf::wait(); }
};

}} // namespace joinable::v0

// ---- joinable/communicator/nccl/detail/host_words.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// Collectives over words of the host, through the device of an NCCL rank. They have a stream of their
/// own: the copy to the device waits for nothing, NCCL runs the collective after that copy and after
/// its earlier collectives, and the copy back follows. The caller's stream neither delays them nor
/// waits for them. The host waits for events, up to the deadline. Several may be under way. Their
/// memory is kept for later ones. An error of CUDA ends all ranks.
class NcclHostWords {
    struct Slot {
        Arena host; ///< pinned
        Arena device;
        CudaEvent copied; ///< after the copy back
        bool is_taken = false;
    };
    struct GiveBack {
        void operator()(Slot* slot) const noexcept { slot->is_taken = false; }
    };
    using TakenSlot = std::unique_ptr<Slot, GiveBack>;

public:
    /// A collective over words of the host. wait() blocks the host until the result is in the host's
    /// buffer, which must stay in place until then.
    class [[nodiscard("destroying the work waits for it: wait() where it is needed")]] Work {
    public:
        /// Ends at the deadline. @throws as NcclWork::synchronize() does.
        void wait() {
            if (!is_done_) {
                copy_back();
                inner_.synchronize();
                words_->wait_for(*slot_);
                take();
            }
        }
        /// True once the result is there. Does not block.
        /// @throws as NcclWork::test() does.
        [[nodiscard]] bool test() { return is_done_ || (inner_.test() && has_come()); }
        /// test() without a deadline. @see NcclWork::progress
        [[nodiscard]] bool progress() { return is_done_ || (inner_.progress() && has_come()); }

    private:
        friend NcclHostWords;
        Work(NcclHostWords& words, TakenSlot slot, Buffer to, NcclWork inner) noexcept
            : words_{&words}, slot_{std::move(slot)}, to_{to}, inner_{std::move(inner)} {}

        void copy_back() {
            if (!is_copied_back_) {
                inner_.wait(words_->stream_.get());
                words_->copy(slot_->device.data(), slot_->host.data(), to_.bytes(), *slot_);
                is_copied_back_ = true;
            }
        }
        /// @pre the collective is complete
        [[nodiscard]] bool has_come() {
            copy_back();
            if (words_->has_copied(*slot_)) {
                take();
            }
            return is_done_;
        }
        void take() noexcept {
            if (to_.count != 0) {
                std::memcpy(to_.data, slot_->host.data(), to_.bytes());
            }
            is_done_ = true;
        }

        NcclHostWords* words_;
        TakenSlot slot_; ///< given back after the collective has ended
        Buffer to_;
        NcclWork inner_;
        bool is_copied_back_ = false; ///< the copy is on the stream
        bool is_done_ = false;
    };

    /// Local; allocates nothing yet.
    NcclHostWords(NcclRank& rank, bool checks) noexcept : rank_{rank}, checks_{checks} {}
    NcclHostWords(NcclHostWords const&) = delete;
    NcclHostWords& operator=(NcclHostWords const&) = delete;
    /// Does not wait for the stream, which may wait for a rank that never comes. The memory goes back
    /// by the deadline, see give_back().
    ~NcclHostWords() = default;

    /// In place.
    Work all_reduce(Buffer buffer, ReduceOp op) {
        return start(buffer, [&](RequestsOf const& requests, Buffer staged) {
            return requests.all_reduce(staged, op);
        });
    }
    Work broadcast(Buffer buffer, int root) {
        return start(buffer, [&](RequestsOf const& requests, Buffer staged) {
            return requests.broadcast(staged, root);
        });
    }

    /// Copies from the device after the work on the caller's stream. `to` is from
    /// Device::allocate_staging(). Blocks the host, up to the deadline.
    /// @throws TimedOut, PeerFailed, CommunicationError, ...
    void download(void const* from, void* to, std::size_t bytes) {
        rank_.require_no_error(); // waits below would replace it
        rank_.on_device([&] {
            prepare();
            check_cuda(cudaEventRecord(caller_has_run_.get(), rank_.caller()), "cudaEventRecord");
            check_cuda(
                cudaStreamWaitEvent(stream_.get(), caller_has_run_.get(), 0), "cudaStreamWaitEvent"
            );
        });
        TakenSlot const slot = take(0);
        copy(from, to, bytes, *slot);
        rank_.wait_until([&] { return has_copied(*slot); }, "waits for a copy to the host");
    }

private:
    template <class Ask>
    Work start(Buffer words, Ask const& ask) {
        check_memory(words);
        rank_.throw_if_aborted();
        rank_.require_no_error(); // queries below would replace it
        TakenSlot slot = take(words.bytes());
        Buffer const staged{slot->device.data(), words.count, words.dtype};
        Request const request = ask(RequestsOf{rank_.rank(), rank_.size()}, staged);
        if (words.count != 0) {
            std::memcpy(slot->host.data(), words.data, words.bytes());
            rank_.on_device([&] { device_->upload(slot->host.data(), staged.data, words.bytes()); }
            );
        }
        NcclWork inner{rank_, post_collective(rank_, request, checks_, stream_.get())};
        return {*this, std::move(slot), words, std::move(inner)};
    }

    /// Copies to the host on the stream, and records the slot's event after it.
    void copy(void const* from, void* to, std::size_t bytes, Slot& slot) {
        rank_.on_device([&] {
            if (bytes != 0) {
                check_cuda(
                    cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_.get()),
                    "cudaMemcpyAsync"
                );
            }
            check_cuda(cudaEventRecord(slot.copied.get(), stream_.get()), "cudaEventRecord");
        });
    }
    [[nodiscard]] bool has_copied(Slot const& slot) {
        return rank_.on_device([&] {
            cudaError_t const found = cudaEventQuery(slot.copied.get());
            if (found != cudaErrorNotReady) {
                check_cuda(found, "cudaEventQuery");
            }
            return found == cudaSuccess;
        });
    }
    /// The collective is complete, so the copy needs no other rank.
    void wait_for(Slot const& slot) {
        rank_.wait_here([&] { return has_copied(slot); }, "waits for a copy to the host");
    }

    /// The smallest free slot of so many bytes, or a new one.
    [[nodiscard]] TakenSlot take(std::size_t bytes) {
        Slot* best = nullptr;
        for (auto const& slot : slots_) {
            if (!slot->is_taken && slot->host.bytes() >= bytes &&
                (best == nullptr || slot->host.bytes() < best->host.bytes()) && has_copied(*slot)) {
                best = slot.get();
            }
        }
        if (best == nullptr) {
            best = &rank_.on_device([&]() -> Slot& { return make(bytes); });
        }
        best->is_taken = true;
        return TakenSlot{best};
    }
    Slot& make(std::size_t bytes) {
        constexpr std::size_t least = 1024;
        std::size_t const room = std::bit_ceil((std::max)(bytes, least));
        prepare();
        device_->set_deadline(rank_.deadline());
        auto slot = std::make_unique<Slot>();
        slot->host = device_->allocate_staging(room);
        slot->device = device_->allocate(room, Arena::default_alignment);
        check_cuda(make_event(slot->copied), "cudaEventCreate");
        slots_.push_back(std::move(slot));
        return *slots_.back();
    }
    /// Makes the stream when it is first needed. Within on_device().
    void prepare() {
        if (stream_ == nullptr) {
            check_cuda(make_event(caller_has_run_), "cudaEventCreate");
            check_cuda(make_stream(stream_), "cudaStreamCreateWithFlags");
            device_.emplace(rank_.device(), stream_.get(), stream_.get());
        }
    }

    NcclRank& rank_;
    bool checks_;
    CudaStream stream_;
    CudaEvent caller_has_run_;
    std::optional<CudaDevice> device_; ///< works on the stream
    std::vector<std::unique_ptr<Slot>> slots_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/nccl/detail/setup.hpp

/// @file
/// The joint preparation of ranks before they have an NCCL communicator. Everything is collective
/// over the control communicator.

namespace joinable { inline namespace v0 { namespace detail {

/// Runs `local()` on every rank. Ranks on which it throws throw that error. The others throw
/// PeerFailed with the text of the lowest such rank. The control communicator stays
/// usable.
template <class Local>
void prepare_together(NcclRank& rank, Local const& local) {
    std::exception_ptr const error = exception_of(local);
    throw_if_any_failed(
        error,
        [&] {
            std::optional<AbortReason> failure;
            rank.over_control([&](NcclControl& control) { // it would end with that error
                std::array<std::uint64_t, 1> failed{error ? 1U : 0U};
                control.sum(failed);
                if (failed[0] != 0) {
                    failure =
                        FailureReport{control}.failure(error != nullptr, failure_of(error).message);
                }
            });
            return failure;
        },
        [](AbortReason const&) {} // over_control() has told the others
    );
}

/// Collective. Whether ranks compare collectives: all have that option, or JOINABLE_CHECK asks for it.
/// @throws Mismatch  ranks differ; ContractViolation  the variable has an unknown word.
[[nodiscard]] inline bool agree_on_check(NcclRank& rank, NcclOptions const& options) {
    auto const share = [&](std::uint64_t word) {
        std::vector<std::uint64_t> words;
        rank.over_control([&](NcclControl& control) { words = control.gather({&word, 1}); });
        return words;
    };
    return agree_to_compare(options.check, "NcclOptions::check", share, rank.is_renumbered());
}

/// The number of lower ranks on this machine.
[[nodiscard]] inline int local_rank(NcclRank& rank) {
    std::array<char, 256> name{};
    gethostname(name.data(), name.size() - 1);
    std::uint64_t const digest = Hash{}.add(std::string_view{name.data()}).value();
    std::vector<std::uint64_t> digests;
    rank.over_control([&](NcclControl& control) { digests = control.gather({&digest, 1}); });
    return static_cast<int>(std::count(digests.begin(), digests.begin() + rank.rank(), digest));
}

/// The objects that every rank needs before it meets the others. Call it by prepare_together.
inline void
prepare_device(NcclRank& rank, NcclOptions const& options, std::optional<cudaStream_t> stream) {
    if (options.device) {
        check_cuda(cudaSetDevice(*options.device), concat("cudaSetDevice(", *options.device, ")"));
    }
    rank.use_device(stream);
    check_nccl_version();
}

/// Whether NCCL returns before it has finished a call on the rank's communicator. NCCL does not
/// report how a communicator was made. But ending a group that is not empty reports "in progress",
/// unless the communicator is blocking. The group here has a message of this rank to itself, from
/// and to one place. NCCL omits that message (before 2.22 it is an empty kernel). Does not wait for
/// other ranks.
/// @throws CommunicationError  NCCL refuses; after aborting.
[[nodiscard]] inline bool is_non_blocking(NcclRank& rank) {
    ncclComm_t const comm = rank.handle();
    cudaStream_t const stream = rank.stream();
    ncclResult_t const begun = ncclGroupStart();
    ncclResult_t const sent = ncclSend(nullptr, 0, ncclInt8, rank.rank(), comm, stream);
    ncclResult_t const received = ncclRecv(nullptr, 0, ncclInt8, rank.rank(), comm, stream);
    ncclResult_t const ended = ncclGroupEnd();
    for (ncclResult_t const result : {begun, sent, received, ended}) {
        rank.check(result, "a message of a rank to itself");
    }
    rank.finish_call("is asked how it was made");
    return ended == ncclInProgress;
}

/// Call it by prepare_together.
/// @throws ContractViolation
inline void require_non_blocking(NcclRank& rank, std::string_view advice) {
    if (!is_non_blocking(rank)) {
        throw ContractViolation{concat(
            "the NCCL communicator is blocking, so a rank that never comes would block the others "
            "for ever: ",
            advice
        )};
    }
}

/// For missing().
inline void share_arrivals(NcclRank& rank) {
    rank.over_control([&](NcclControl& control) {
        rank.share_arrivals(
            control.share(static_cast<std::size_t>(rank.size()) * NcclDeadline::line_bytes)
        );
    });
}

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/nccl/collectives.hpp

namespace joinable { inline namespace v0 {

namespace detail {
class NcclGraph;
} // namespace detail

/// Collects the calls on its communicator while it lives, and then launches them as one. Made by
/// group() of the communicator. Their work cannot be waited for before that. While the group is
/// open, its thread must not call other NCCL communicators.
class NcclGroup {
public:
    NcclGroup(NcclGroup const&) = delete;
    NcclGroup& operator=(NcclGroup const&) = delete;
    /// Ends the group. During unwinding it aborts, because the other ranks' groups have more calls.
    /// The waits for the group's work throw its errors.
    ~NcclGroup() {
        if (is_open()) {
            try {
                if (unwinding_.has_begun()) {
                    abort_for_exception(rank_, "a group of collectives");
                } else {
                    rank_.end_group();
                }
            } catch (...) { // NOLINT(bugprone-empty-catch): the works throw it
            }
        }
        rank_.release(launch_);
    }

    /// Ends the group before the token is destroyed. A second call has no effect.
    /// @throws CommunicationError, PeerFailed  NCCL refuses the group's calls.
    void end() {
        if (is_open()) {
            rank_.end_group();
        }
    }

private:
    friend class NcclCollectives;
    explicit NcclGroup(detail::NcclRank& rank) : rank_{rank}, launch_{rank.begin_group()} {}

    [[nodiscard]] bool is_open() const noexcept {
        return launch_.state == detail::NcclLaunch::State::open;
    }

    detail::NcclRank& rank_;
    detail::NcclLaunch& launch_;
    detail::Unwinding unwinding_;
};

/// The members that NcclCommunicator and NcclCommunicatorRef have in common.
///
/// Collectives run on the communicator's stream. Each starts after the work that was on the
/// caller's stream when it was called; NcclWork::wait() makes the caller's stream wait for it. The
/// host blocks in barrier(), synchronize(), split(), allocate(), register_arena(), the
/// constructors, `check`, and while NCCL launches earlier collectives. Each of these waits ends at
/// the deadline, on an error that NCCL reports, or when any rank aborts. Aborts travel over the
/// control communicator. Only a waiting host checks for them. Wait for streams by synchronize(),
/// not by cudaStreamSynchronize, which never returns if a rank never comes.
///
/// One thread at a time may use it, any one: its device is made the current one for each call, and the
/// thread's own one again after that. CUDA graphs that other threads capture meanwhile stay as they
/// are. A call throws ContractViolation if an earlier launch or call of CUDA in its thread failed and
/// nobody has asked cudaGetLastError() for that, as nothing else would tell; it then forgets the error.
///
/// Memory of the host or of another device, and operations that NCCL does not have (bit_and, bit_or),
/// throw ContractViolation before any data moves. NCCL determines the order of sums. The factor of a
/// scaled sum is rounded to the dtype: see ScalesSums.
///
/// abort() ends outstanding work here and, over the control communicator, on all ranks. It frees NCCL's handle; an engine
/// that owns it must not destroy it. If the control communicator does not model TellsReason, abort_reason() is empty until
/// a call has thrown. Waits for collectives learn of keep_alive() if the control communicator models SharesMemory and its
/// ranks are on one machine, else missing_ranks() is empty; waits of the control communicator learn of it if that models
/// RenewsDeadline. If it models neither, keep_alive() throws ContractViolation.
///
/// Messages are not compared by `check`, not even in count and dtype. NCCL has no tags: messages between
/// two ranks match in the order of the calls, whatever their tags. Two ranks that send to each other must
/// do so in a group().
class NcclCollectives : public detail::RankMembers<NcclCollectives>,
                        public detail::Collectives<NcclCollectives, NcclWork>,
                        public detail::Messages<NcclCollectives, NcclWork> {
public:
    using device_type = CudaDevice;

    NcclCollectives(NcclCollectives const&) = delete;
    NcclCollectives& operator=(NcclCollectives const&) = delete;

    [[nodiscard]] int device() const noexcept { return rank_.device(); }
    /// Null once the communicator is aborted.
    [[nodiscard]] ncclComm_t native_handle() const noexcept { return rank_.handle(); }
    /// The stream on which collectives run.
    [[nodiscard]] cudaStream_t stream() const noexcept { return rank_.stream(); }

    /// Local. From now on the caller makes and uses data on `caller`. The stream must exist while
    /// it is set: using a destroyed stream is undefined in CUDA. Returns the previous stream.
    cudaStream_t set_stream(cudaStream_t caller) noexcept {
        if (device_memory_) {
            device_memory_->set_streams(caller, caller);
        }
        return rank_.set_caller(caller);
    }
    /// For buckets: operates on the device's memory, on the caller's stream. Without kernels
    /// (CudaDevice::use_kernels) NCCL scales gradients while it sums them, and a sum of f16 by
    /// tokens may be refused, see GradientKind::sum. Use kernels on all ranks, or on none.
    [[nodiscard]] CudaDevice& device_memory() {
        if (!device_memory_) {
            device_memory_.emplace(rank_);
        }
        return *device_memory_;
    }

    /// Local. Zeroed device memory for register_arena(), from NCCL's allocator, or from the device
    /// if NCCL has none. An arena may outlive the communicator. If the arena is destroyed first,
    /// the host waits for all outstanding collectives, up to the deadline, or aborts them during
    /// unwinding. If an abort outlasts the deadline, memory that NCCL may still use is freed after it.
    /// Destroy a CapturedStep that uses the arena before the arena.
    /// @throws ContractViolation  alignment is not a power of two.
    /// @throws CommunicationError  the device is out of memory.
    [[nodiscard]] Arena
    allocate(std::size_t bytes, std::size_t alignment = Arena::default_alignment) {
        Arena arena = bytes == 0 ? Arena{} : arenas_.allocate(bytes, alignment);
        return arena.data() != nullptr ? std::move(arena)
                                       : device_memory().allocate(bytes, alignment);
    }
    /// Collective; blocks. Has NCCL map an arena of allocate() for all ranks, so that collectives
    /// read and write it in place. From NCCL 2.27 on the arena is a symmetric window. All ranks
    /// must then pass buffers in it at the same offset. The registration lasts until the arena or
    /// the communicator is destroyed. Registering again has no effect.
    /// Returns false on all ranks if any rank's arena is not NCCL's memory or its NCCL does not
    /// support registration; the arena is then used like any other memory.
    /// @throws Mismatch  ranks give arenas of different sizes; nothing was registered.
    /// @throws CommunicationError, PeerFailed, TimedOut  after aborting, on all ranks: NCCL refuses
    ///         on any of them, after which its communicator is unusable.
    bool register_arena(Arena const& arena) { return arenas_.register_arena(arena); }

    /// A barrier of the hosts. Streams do not stop.
    void barrier() {
        rank_.over_control([](detail::NcclControl& control) { control.barrier(); });
    }

    /// For guards.
    [[nodiscard]] void const* identity() const noexcept { return this; }
    /// The same ranks for a few words of the host, see detail::NcclHostWords. Agreements use it.
    [[nodiscard]] detail::NcclHostWords& host_words() noexcept { return host_words_; }

    /// Calls from now on are launched as one when the token is destroyed. Every rank makes the same
    /// calls.
    [[nodiscard]] NcclGroup group() { return NcclGroup{rank_}; }

    /// Blocks the host until all posted collectives and the work on the caller's stream have run,
    /// up to the deadline.
    /// @throws TimedOut, PeerFailed, ...  the streams are no longer stuck then.
    void synchronize() {
        rank_.require_no_error();
        rank_.synchronize();
    }

    /// Local; for waits that start later. Returns the deadline that was in force.
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) noexcept {
        if (device_memory_) {
            device_memory_->set_deadline(deadline);
        }
        return rank_.set_deadline(deadline);
    }
    /// Local. keep_alive() for callers that can do without: false where no rank can learn of it.
    /// Guards call it, so a class that hides keep_alive() hides both.
    bool renew_deadline() { return rank_.renew_deadline(); }

protected:
    /// Ranks agree on NcclOptions::check, unless it `is_agreed`, as in a group.
    NcclCollectives(
        std::unique_ptr<detail::NcclControl> control,
        NcclOptions const& options,
        bool is_agreed = false
    )
        : rank_{std::move(control), options},
          checks_{is_agreed ? options.check : detail::agree_on_check(rank_, options)},
          host_words_{rank_, checks_} {}
    ~NcclCollectives() = default;

    /// Whether ranks compare collectives; they have agreed on it.
    [[nodiscard]] bool compares_collectives() const noexcept { return checks_; }

    /// The common part of the destructors: see NcclRank::close.
    ncclComm_t close(bool owns_handle) noexcept {
        if (!unwinding_.has_begun() && rank_.is_here()) {
            arenas_.deregister_all();
        }
        return rank_.close(unwinding_.has_begun(), owns_handle);
    }

    detail::NcclRank rank_;

private:
    friend class detail::NcclGraph;
    friend class detail::RankMembers<NcclCollectives>;
    [[nodiscard]] detail::NcclRank& own_rank() noexcept { return rank_; }
    [[nodiscard]] detail::NcclRank const& own_rank() const noexcept { return rank_; }
    friend class detail::BasicCollectives<NcclCollectives, NcclWork>;
    friend class detail::Messages<NcclCollectives, NcclWork>;

    [[nodiscard]] NcclWork post(detail::Request const& request) {
        return {rank_, detail::post_collective(rank_, request, checks_, rank_.caller())};
    }
    [[nodiscard]] NcclWork post_message(bool is_send, int peer, int /*tag*/, Buffer buffer) {
        rank_.check_memory(buffer);
        if (peer == rank() && !rank_.has_group()) {
            throw ContractViolation{
                "with NCCL a message of a rank to itself needs its other side in the same group: "
                "call send() and receive() in a group()"
            };
        }
        auto const call = [&](detail::NcclCalls const& nccl) {
            return is_send ? nccl.send(buffer, peer) : nccl.receive(buffer, peer);
        };
        return {rank_, detail::post_calls(rank_, 0, "a message", rank_.caller(), call)};
    }

    bool checks_;
    detail::NcclHostWords host_words_;
    detail::NcclArenas arenas_{rank_};
    std::optional<detail::NcclDevice> device_memory_;
    detail::Unwinding unwinding_;
};

}} // namespace joinable::v0

// ---- joinable/communicator/nccl/communicator.hpp

namespace joinable { inline namespace v0 {

/// Ranks are GPUs, one each, that NCCL connects. A host communicator of the same ranks lets them
/// meet, and ends all of them when one fails. See NcclCollectives.
///
/// @code
/// joinable::NcclCommunicator comm{hosts, {.stream = compute}};
/// auto work = comm.all_reduce({gradients, count, joinable::DType::f32}, joinable::ReduceOp::sum);
/// work.wait();           // later work on `compute` runs after the sum
/// comm.synchronize();    // instead of cudaStreamSynchronize(compute): ends if a rank never comes
/// @endcode
class NcclCommunicator : public NcclCollectives {
public:
    static constexpr std::string_view transport = "nccl";
    /// See ProcessCommunicator::is_launched.
    [[nodiscard]] static bool is_launched() { return ProcessCommunicator::is_launched(); }

    /// Collective; blocks. `control` is a host communicator of the same ranks that models Aborts.
    /// The constructor, barrier(), split() and `check` use it. Aborting one communicator aborts
    /// both. It must outlive this object. The rank's device is the current one unless the options
    /// name one.
    /// @throws CommunicationError  no usable GPU, or NCCL refuses; the others then throw PeerFailed
    ///                             with the text.
    /// @throws TimedOut  ranks did not come.
    /// @throws Mismatch  ranks differ in `check`, or in JOINABLE_CHECK=collectives; an unknown word there is a
    ///                   ContractViolation, and PeerFailed on the others.
    /// @throws ContractViolation  an option needs a later NCCL, or NCCL_COMM_BLOCKING makes all
    ///                            communicators blocking.
    template <Communicator Control>
    explicit NcclCommunicator(Control& control, NcclOptions const& options = {})
        : NcclCommunicator{detail::nccl_control<Control&>(control), options, false} {}

    /// The same for ranks that mpirun, mpiexec, torchrun or srun started on one machine. It owns a
    /// ProcessCommunicator. If the options name no device, a rank takes the device whose index is
    /// its local rank modulo the number of devices, and makes it the current one.
    /// @throws ContractViolation  also if launch_environment() fails, or there are several
    ///                            machines.
    [[nodiscard]] static NcclCommunicator from_environment(NcclOptions const& options = {}) {
        return from_environment(
            [&] { return ProcessCommunicator::from_environment(options.deadline); }, options
        );
    }
    /// The same with the host communicator that `make_control()` returns, for ranks on any
    /// machines. If it returns a reference, as when a guard uses the communicator too, that must
    /// outlive this object.
    template <class MakeControl>
        requires std::is_invocable_v<MakeControl const&>
    [[nodiscard]] static NcclCommunicator
    from_environment(MakeControl const& make_control, NcclOptions const& options = {}) {
        using Control = std::invoke_result_t<MakeControl const&>;
        return NcclCommunicator{detail::nccl_control<Control>(make_control), options, true};
    }

    /// Collective. Waits until all ranks have finished their outstanding work; aborts at the
    /// deadline, or at once during unwinding. NCCL's handle is freed in any case.
    ~NcclCommunicator() { close(true); }

    /// Collective; blocks. The ranks with the same `color` (>= 0) form a group, ordered by `key`,
    /// then by their rank here. The group inherits deadline, stream and options. Aborting this
    /// communicator aborts the group, but not the reverse, if the control communicator works that
    /// way.
    /// @throws ContractViolation  the control communicator does not model Splits, or its transport cannot.
    [[nodiscard]] NcclCommunicator split(int color, int key) {
        detail::check_color(color);
        if (!can_split()) {
            throw ContractViolation{
                "an NCCL communicator splits with its control communicator, but that has no 'split(int color, "
                "int key)', or its transport has none; use one that models Splits"
            };
        }
        rank_.begin_call();
        detail::CurrentCudaDevice const current{rank_.device(), std::nothrow};
        std::unique_ptr<detail::NcclControl> control;
        rank_.over_control([&](detail::NcclControl& whole) { control = whole.split(color, key); });
        ncclConfig_t config = config_of(options_);
        auto const group = std::make_shared<detail::NcclSplit>(rank_.deadline());
        rank_.finish_into(group, "ncclCommSplit", "splits the communicator", [&] {
            return ncclCommSplit(rank_.handle(), color, key, &group->made, &config);
        });
        rank_.forget(group.get());
        NcclOptions options = options_;
        options.device = rank_.device();
        options.stream = rank_.caller();
        options.deadline = rank_.deadline();
        options.check = compares_collectives();
        return NcclCommunicator{std::move(control), options, std::exchange(group->made, nullptr)};
    }

    /// Local, the same on all ranks. Whether the control communicator can.
    [[nodiscard]] bool can_split() const { return rank_.control().can_split(); }

private:
    NcclCommunicator(
        std::unique_ptr<detail::NcclControl> control, NcclOptions const& options, bool picks_device
    )
        : NcclCollectives{std::move(control), options}, options_{options} {
        if (picks_device && !options_.device) {
            pick_device();
        }
        ncclUniqueId id{};
        detail::prepare_together(rank_, [&] {
            detail::prepare_device(rank_, options_, {});
            if (rank() == 0) {
                detail::check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId");
            }
        });
        rank_.over_control([&](detail::NcclControl& of_all) {
            auto words = std::bit_cast<std::array<std::uint64_t, sizeof id / 8>>(id);
            of_all.broadcast(words, 0);
            id = std::bit_cast<ncclUniqueId>(words);
        });
        ncclComm_t made = nullptr;
        ncclConfig_t config = config_of(options_);
        ncclResult_t const result = ncclCommInitRankConfig(&made, size(), id, rank(), &config);
        take(made, [&] {
            rank_.check(result, "ncclCommInitRankConfig");
            rank_.finish_call("joins the communicator");
        });
        try {
            detail::prepare_together(rank_, [&] {
                detail::require_non_blocking(
                    rank_,
                    "the environment or nccl.conf sets NCCL_COMM_BLOCKING, which overrides the options of "
                    "this library; unset it"
                );
            });
        } catch (...) {
            rank_.close(false, true);
            throw;
        }
    }
    /// For split(): the communicator of a group.
    NcclCommunicator(
        std::unique_ptr<detail::NcclControl> control, NcclOptions const& options, ncclComm_t made
    )
        : NcclCollectives{std::move(control), options, true}, options_{options} {
        take(made, [&] {
            detail::prepare_together(rank_, [&] { detail::prepare_device(rank_, options_, {}); });
        });
    }

    /// Owns the handle from here on, even if `finish()` throws.
    template <class Finish>
    void take(ncclComm_t made, Finish const& finish) {
        rank_.adopt(made);
        try {
            finish();
            detail::share_arrivals(rank_);
        } catch (...) {
            rank_.close(true, true);
            throw;
        }
    }

    void pick_device() {
        int const place = detail::local_rank(rank_);
        detail::prepare_together(rank_, [&] {
            int devices = 0;
            detail::check_cuda(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
            options_.device = place % devices;
        });
    }
    [[nodiscard]] static ncclConfig_t config_of(NcclOptions const& options) noexcept {
        ncclConfig_t config = options.config;
        config.blocking = 0; // else a rank that never comes would block the others for ever
        return config;
    }

    NcclOptions options_;
};

}} // namespace joinable::v0

// ---- joinable/communicator/nccl/ref.hpp

namespace joinable { inline namespace v0 {

/// Borrows an engine's own NCCL communicator. See NcclCollectives. Nobody else may use the handle
/// while this object lives. If a rank fails before this object has ended on all ranks, the handle
/// is aborted, which frees it. An engine therefore calls give_back(), which returns the handle if
/// there is one left to destroy.
class NcclCommunicatorRef : public NcclCollectives {
public:
    /// Collective; blocks. `comm` has the ranks of `control` in the same order and was made with
    /// config.blocking = 0: a blocking one could block the host for ever. Its collectives run on
    /// `stream`. `control` is as for NcclCommunicator. All three must outlive this object.
    /// @throws Mismatch  as NcclCommunicator.
    /// @throws ContractViolation  the handle is null or blocking, or its ranks or its device differ
    ///                            from `control` and the current device; ranks where it is fine
    ///                            then throw PeerFailed.
    template <Communicator Control>
    NcclCommunicatorRef(
        Control& control, ncclComm_t comm, cudaStream_t stream, NcclOptions const& options = {}
    )
        : NcclCollectives{detail::nccl_control<Control&>(control), options} {
        rank_.set_caller(options.stream.value_or(stream));
        detail::prepare_together(rank_, [&] {
            detail::prepare_device(rank_, options, stream);
            if (comm == nullptr) {
                throw ContractViolation{
                    "an NCCL communicator is lent as a handle, but was given a null pointer"
                };
            }
        });
        rank_.adopt(comm);
        try {
            rank_.finish_call("waits for what NCCL does with the communicator");
            detail::prepare_together(rank_, [&] {
                check_members(comm);
                detail::require_non_blocking(
                    rank_,
                    "make the lent one by ncclCommInitRankConfig with config.blocking = 0, "
                    "and do not set NCCL_COMM_BLOCKING"
                );
            });
            detail::share_arrivals(rank_);
        } catch (...) {
            rank_.close(false, false);
            throw;
        }
    }

    /// Collective. Waits for the other ranks; aborts at the deadline, or at once during unwinding.
    /// Otherwise the owner may use the handle again.
    ~NcclCommunicatorRef() {
        if (is_lent_) {
            close(false);
        }
    }

    /// Collective. Does early what the destructor does; call nothing else afterwards. Returns the
    /// handle to its owner, or null if a failure of any rank has freed it.
    [[nodiscard]] ncclComm_t give_back() noexcept {
        is_lent_ = false;
        return close(false);
    }

private:
    void check_members(ncclComm_t comm) {
        expect("rank", rank(), asked(ncclCommUserRank, "ncclCommUserRank", comm));
        expect("number of ranks", size(), asked(ncclCommCount, "ncclCommCount", comm));
        expect("device", device(), asked(ncclCommCuDevice, "ncclCommCuDevice", comm));
    }
    template <class Ask>
    static int asked(Ask ask, std::string_view call, ncclComm_t comm) {
        int found = -1;
        detail::check_nccl(ask(comm, &found), call, comm);
        return found;
    }
    static void expect(std::string_view what, int expected, int found) {
        if (found != expected) {
            throw ContractViolation{detail::concat(
                "the NCCL communicator that is lent has ",
                what,
                " ",
                found,
                ", but ",
                expected,
                " was expected: it must have the ranks of the control communicator, and its device "
                "be the current one"
            )};
        }
    }

    bool is_lent_ = true;
};

}} // namespace joinable::v0

// ---- joinable/communicator/nccl/staged.hpp

namespace joinable { inline namespace v0 {

/// A collective of a StagedNcclCommunicator, whose `comm` must outlive it. wait() blocks the host until
/// the result is in the host's buffer. The buffer must stay in place until then.
using StagedNcclWork = detail::NcclHostWords::Work;

/// NCCL ranks as a host communicator, for the roll calls of a guard when no other host communicator
/// is available: NcclCommunicator::from_environment() keeps its own private.
///
/// @code
/// auto comm = joinable::NcclCommunicator::from_environment();
/// joinable::StagedNcclCommunicator staged{comm};
/// joinable::Join guard{joinable::participants(ddp), joinable::control(staged)};
/// @endcode
///
/// Each collective copies to the device, runs NCCL's all-reduce or broadcast after all earlier work
/// of NCCL, and copies back. The host waits for that. A host communicator answers a roll call while
/// the device computes; this one answers after the last round's gradients have been reduced. It
/// does not wait for the engine's stream. Prefer control() with a host communicator.
///
/// NCCL does not end a collective on all ranks at once. If a rank aborts right after a roll call, a
/// rank that has not seen its answer throws the abort's reason instead.
///
/// Several collectives may be under way. It is for a few words, not for gradients; `comm` keeps their
/// memory.
class StagedNcclCommunicator {
public:
    /// Local. `comm` must outlive this object.
    explicit StagedNcclCommunicator(NcclCollectives& comm) noexcept : comm_{comm} {}
    StagedNcclCommunicator(StagedNcclCommunicator const&) = delete;
    StagedNcclCommunicator& operator=(StagedNcclCommunicator const&) = delete;

    [[nodiscard]] int rank() const noexcept { return comm_.rank(); }
    [[nodiscard]] int size() const noexcept { return comm_.size(); }

    /// In place, on host memory.
    /// @throws as the members of NcclCommunicator.
    StagedNcclWork all_reduce(Buffer buffer, ReduceOp op) {
        return comm_.host_words().all_reduce(buffer, op);
    }
    StagedNcclWork broadcast(Buffer buffer, int root) {
        return comm_.host_words().broadcast(buffer, root);
    }
    void barrier() { comm_.barrier(); }

    void abort(AbortReason const& reason) { comm_.abort(reason); }
    [[nodiscard]] bool is_aborted() const { return comm_.is_aborted(); }
    [[nodiscard]] std::optional<AbortReason> abort_reason() const { return comm_.abort_reason(); }
    [[nodiscard]] bool is_renumbered() const { return comm_.is_renumbered(); }
    /// Sets the deadline of `comm`, too.
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) noexcept {
        return comm_.set_deadline(deadline);
    }
    /// See NcclCollectives.
    void keep_alive() { comm_.keep_alive(); }
    bool renew_deadline() { return comm_.renew_deadline(); }
    [[nodiscard]] std::vector<int> missing_ranks() const { return comm_.missing_ranks(); }
    /// For guards.
    [[nodiscard]] void const* identity() const noexcept { return comm_.identity(); }

private:
    NcclCollectives& comm_;
};

}} // namespace joinable::v0

// ---- joinable/nccl.hpp

/// @file
/// Opt-in: GPU communicators over NCCL. Needs the headers of NCCL and CUDA and the libraries nccl
/// and cudart; in CMake, the target joinable::nccl.
