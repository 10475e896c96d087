// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/nccl_api.hpp>
#include <joinable/communicator/detail/nccl_arrivals.hpp>
#include <joinable/communicator/detail/nccl_control.hpp>
#include <joinable/communicator/detail/nccl_launch.hpp>
#include <joinable/communicator/nccl_options.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable::inline v0::detail {

/// The reason of what a control communicator threw.
[[nodiscard]] inline AbortReason reason_of(std::exception_ptr const& error) {
    try {
        std::rethrow_exception(error);
    } catch (CommunicationError const& failure) {
        return {FailureKind::communication, {}, failure.what()};
    } catch (ContractViolation const& failure) {
        return {FailureKind::contract, {}, failure.what()};
    } catch (...) {
        return failure_of(error);
    }
}

/// What has kernels of NCCL for later, in a CUDA graph: NCCL frees no handle as long as there are any,
/// so they go before it.
class HoldsNcclKernels {
public:
    virtual void let_go() noexcept = 0;

protected:
    ~HoldsNcclKernels() = default;
};

class NcclRank;

/// Whose group is open on this thread: NCCL has one for all communicators of a thread.
inline thread_local NcclRank const* grouping_rank = nullptr;

/// One rank of an NCCL communicator, that of an engine or its own: what its collectives, works and
/// groups have in common. Every wait of the host is in wait_until(), which polls what can end it.
class NcclRank {
public:
    NcclRank(std::unique_ptr<NcclControl> control, NcclOptions const& options)
        : control_{std::move(control)}, rank_{control_->rank()}, size_{control_->size()},
          deadline_{options.deadline}, revokes_{options.revoke},
          caller_{options.stream.value_or(nullptr)} {}
    NcclRank(NcclRank const&) = delete;
    NcclRank& operator=(NcclRank const&) = delete;
    ~NcclRank() {
        if (ready_ != nullptr) {
            static_cast<void>(cudaEventDestroy(ready_));
        }
        if (owns_stream_) {
            static_cast<void>(cudaStreamDestroy(stream_));
        }
    }

    [[nodiscard]] int rank() const noexcept { return rank_; }
    [[nodiscard]] int size() const noexcept { return size_; }
    [[nodiscard]] int device() const noexcept { return device_; }
    [[nodiscard]] ncclComm_t handle() const noexcept { return comm_; }
    [[nodiscard]] cudaStream_t stream() const noexcept { return stream_; }
    [[nodiscard]] NcclControl& control() const noexcept { return *control_; }

    [[nodiscard]] cudaStream_t caller() const noexcept { return caller_; }
    cudaStream_t set_caller(cudaStream_t stream) noexcept { return std::exchange(caller_, stream); }
    [[nodiscard]] std::chrono::nanoseconds deadline() const noexcept { return deadline_; }
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) noexcept {
        return std::exchange(deadline_, deadline);
    }

    // -- beginning and end --------------------------------------------------------------------------

    /// Takes the current device. Collectives run on `stream`; none: on one of its own.
    void use_device(std::optional<cudaStream_t> stream) {
        check_cuda(
            cudaGetDevice(&device_),
            "an NCCL rank needs a GPU that this process can use, but cudaGetDevice"
        );
        check_cuda(cudaEventCreateWithFlags(&ready_, cudaEventDisableTiming), "cudaEventCreate");
        if (stream) {
            stream_ = *stream;
            return;
        }
        check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
        owns_stream_ = true;
    }
    void set_arrivals(NcclArrivals arrivals) noexcept { arrivals_ = std::move(arrivals); }

    /// The handle must be alive until close(), or until this rank is spent.
    void adopt(ncclComm_t comm) noexcept { comm_ = comm; }

    void hold(HoldsNcclKernels& holder) { holders_.push_back(&holder); }
    void unhold(HoldsNcclKernels& holder) noexcept { std::erase(holders_, &holder); }

    /// Before NCCL is asked something that is no collective.
    void begin_call() {
        begin();
        if (group_ != nullptr) {
            throw ContractViolation{"a group of this communicator is open, which takes collectives "
                                    "and messages only: end "
                                    "it first"};
        }
        settle();
    }
    /// Waits until NCCL is done with what was asked of the handle: `doing` says what that is.
    void finish_call(std::string_view doing) {
        wait_until([&] { return async_state() == ncclSuccess; }, doing, 0);
    }

    /// Collective. Frees the handle, if it is to, after what is under way on all ranks, within the
    /// deadline: later it aborts, and at once if `is_unwinding`.
    void close(bool is_unwinding, bool owns_handle) noexcept {
        let_go();
        try {
            if (is_unwinding) {
                abort_for_exception("the scope of its communicator");
            } else if (!is_spent()) {
                settle();
                if (owns_handle) {
                    check(ncclCommFinalize(comm_), "ncclCommFinalize");
                    finish_call("leaves the communicator");
                }
                // A rank that leaves the control communicator looks to the others like one that failed.
                over_control([](NcclControl& control) { control.barrier(); });
                if (owns_handle) {
                    static_cast<void>(ncclCommDestroy(std::exchange(comm_, nullptr)));
                }
            } else {
                poll();
            }
        } catch (...) { // NOLINT(bugprone-empty-catch): the failure has ended it on all ranks
        }
        if (owns_handle && comm_ != nullptr) { // revoked
            static_cast<void>(ncclCommAbort(comm_));
        }
        comm_ = nullptr;
    }

    // -- failures -----------------------------------------------------------------------------------

    [[nodiscard]] bool is_spent() const { return failure_ != nullptr || control_->is_spent(); }

    /// Ends this rank's part, unless that has happened: what is under way and has not run is lost. The
    /// others are told by the control communicator, where the first reason wins.
    void abort(AbortReason const& reason) noexcept {
        if (failure_) {
            return;
        }
        try {
            control_->abort(reason);
            control_->barrier(); // throws what the first of all said
            failure_ = std::make_exception_ptr(CommunicationError{reason.message});
        } catch (...) {
            failure_ = std::current_exception();
        }
        end_handle();
    }
    void abort_for_exception(std::string const& what) noexcept {
        abort(blamed_on(rank_, {FailureKind::peer_failed, {}, "an exception left " + what}));
    }
    [[noreturn]] void fail(AbortReason const& reason) {
        abort(reason);
        std::rethrow_exception(failure_);
    }
    /// @throws CommunicationError, PeerFailed  what NCCL says of a call, after aborting.
    void check(ncclResult_t result, std::string_view call) {
        if (is_error(result)) {
            fail(
                {result == ncclRemoteError ? FailureKind::peer_failed : FailureKind::communication,
                 {},
                 concat("rank ", rank_, ": ", call, ": ", nccl_text(result, comm_))}
            );
        }
    }
    /// The same of a call of CUDA.
    void check(cudaError_t error, std::string_view call) {
        if (error != cudaSuccess) {
            static_cast<void>(cudaGetLastError()); // whoever asks next is not to find it
            fail(
                {FailureKind::communication,
                 {},
                 concat("rank ", rank_, ": ", call, " failed: ", cudaGetErrorString(error))}
            );
        }
    }
    /// The same where a stream of the caller is at stake.
    /// @throws ContractViolation  that is not one; nothing is aborted.
    void check_stream(cudaError_t error, std::string_view call) {
        if (error == cudaErrorInvalidResourceHandle) {
            static_cast<void>(cudaGetLastError());
            throw ContractViolation{concat(
                "the stream on which data is made or used cannot be: ",
                call,
                " says ",
                cudaGetErrorString(error),
                "; give set_stream() one of device ",
                device_,
                " that was not destroyed"
            )};
        }
        check(error, call);
    }
    /// @throws ContractViolation  it is not this device's memory.
    void check_memory(ConstBuffer buffer) {
        if (buffer.count != 0) {
            cudaPointerAttributes found{};
            check(cudaPointerGetAttributes(&found, buffer.data), "cudaPointerGetAttributes");
            check_device_memory(buffer, found, device_);
        }
    }
    void throw_if_spent() {
        poll();
        if (failure_) {
            std::rethrow_exception(failure_);
        }
    }

    /// Runs f(control) with this rank's deadline; what that throws ends this rank, too.
    template <class F>
    void over_control(F const& f) {
        throw_if_spent();
        auto const before = control_->set_deadline(deadline_);
        try {
            f(*control_);
        } catch (...) {
            abort(reason_of(std::current_exception()));
        }
        if (before) {
            control_->set_deadline(*before);
        }
        if (failure_) {
            std::rethrow_exception(failure_);
        }
    }

    // -- launches -----------------------------------------------------------------------------------

    /// Hands something to NCCL by `issue()`, after what is on the caller's stream. `collectives` says
    /// how many collectives it is; messages are none. Blocks only until NCCL has launched what came
    /// before.
    /// @throws ContractViolation  the caller's stream cannot be used; nothing was handed over.
    template <class Issue>
    [[nodiscard]] NcclLaunch& post(std::uint64_t collectives, Issue const& issue) {
        begin();
        if (group_ == nullptr) {
            settle();
        }
        order_after_caller();
        NcclLaunch& launch = group_ != nullptr ? *group_ : take_launch();
        launch.users += group_ != nullptr ? 1 : 0;
        try {
            issue();
        } catch (...) {
            --launch.users;
            if (group_ == nullptr) {
                launch.state = NcclLaunch::State::lost;
            }
            throw;
        }
        posted_ += collectives;
        if (collectives != 0) {
            launch.number = posted_;
            arrivals_.arrive(rank_, posted_);
        }
        if (group_ == nullptr) {
            hand_over(launch);
        }
        return launch;
    }

    /// What is posted from here on goes to NCCL at once, by end_group(). Returns what that will be.
    [[nodiscard]] NcclLaunch& begin_group() {
        begin_call();
        NcclLaunch& launch = take_launch();
        check(ncclGroupStart(), "ncclGroupStart");
        group_ = &launch;
        grouping_rank = this;
        return launch;
    }
    void end_group() {
        NcclLaunch& launch = *std::exchange(group_, nullptr);
        grouping_rank = nullptr;
        ncclResult_t const result = ncclGroupEnd();
        launch.state = NcclLaunch::State::posted;
        check(result, "ncclGroupEnd");
        hand_over(launch);
    }

    void release(NcclLaunch& launch) noexcept { --launch.users; }

    // -- waiting ------------------------------------------------------------------------------------

    /// Makes `stream` wait for the launch. The host waits only until NCCL has launched it.
    void order_before(NcclLaunch& launch, cudaStream_t stream) {
        require_ended(launch);
        if (launch.state == NcclLaunch::State::posted) {
            settle();
        }
        if (!has_run(launch)) {
            check_stream(cudaStreamWaitEvent(stream, launch.done, 0), "cudaStreamWaitEvent");
        }
    }
    /// Does not wait. Whether the results are final.
    [[nodiscard]] bool test(NcclLaunch& launch) {
        require_ended(launch);
        return (launch.state != NcclLaunch::State::posted || try_settle()) && has_run(launch);
    }
    /// Makes the host wait for the launch.
    void synchronize(NcclLaunch& launch) {
        require_ended(launch);
        if (launch.state == NcclLaunch::State::posted) {
            settle();
        }
        wait_until([&] { return has_run(launch); }, "waits for a collective", launch.number);
    }
    /// Makes the host wait for everything that is posted, and for what is on the caller's stream.
    void synchronize() {
        settle();
        launches_.for_each_unsettled([&](NcclLaunch& launch) { synchronize(launch); });
        wait_until([&] { return has_caller_run(); }, "waits for a stream", 0);
    }

    /// Who has not posted this rank's oldest unfinished collective, where that is known.
    [[nodiscard]] std::vector<int> missing() const {
        std::uint64_t oldest = posted_ + 1;
        launches_.for_each_unsettled([&](NcclLaunch const& launch) {
            if (launch.number != 0 && launch.number < oldest && !launch.has_run()) {
                oldest = launch.number;
            }
        });
        return oldest > posted_ ? std::vector<int>{} : arrivals_.missing(size_, oldest);
    }

private:
    using Clock = std::chrono::steady_clock;

    /// Takes over what ended the others, and what NCCL found out by itself.
    void poll() noexcept {
        if (failure_) {
            return;
        }
        try {
            if (control_->is_spent()) {
                abort({FailureKind::communication, {}, "another rank aborted"});
            } else if (ncclResult_t const state = async_state(); is_error(state)) {
                check(state, "an asynchronous error");
            }
        } catch (...) { // NOLINT(bugprone-empty-catch): failure_ has it
        }
    }
    [[nodiscard]] ncclResult_t async_state() const {
        ncclResult_t state = ncclSuccess;
        ncclResult_t const asked =
            comm_ == nullptr ? ncclSuccess : ncclCommGetAsyncError(comm_, &state);
        return is_error(asked) ? asked : state;
    }

    /// Before anything that NCCL is asked.
    void begin() {
        throw_if_spent();
        if (grouping_rank != nullptr && grouping_rank != this) {
            throw ContractViolation{"a group of another NCCL communicator is open on this thread, "
                                    "and NCCL would put this "
                                    "off until it ends: end it first"};
        }
    }
    [[nodiscard]] NcclLaunch& take_launch() {
        try {
            return launches_.take();
        } catch (CommunicationError const& error) {
            fail({FailureKind::communication, {}, concat("rank ", rank_, ": ", error.what())});
        }
    }
    void hand_over(NcclLaunch& launch) {
        launch.state = NcclLaunch::State::posted;
        unsettled_ = &launch;
        static_cast<void>(try_settle());
    }
    /// Puts the event behind what NCCL was given last, if NCCL has put that on the stream.
    bool try_settle() {
        if (unsettled_ == nullptr) {
            return true;
        }
        throw_if_spent();
        if (async_state() != ncclSuccess) {
            return false;
        }
        NcclLaunch& launch = *std::exchange(unsettled_, nullptr);
        check(cudaEventRecord(launch.done, stream_), "cudaEventRecord");
        launch.state = NcclLaunch::State::launched;
        return true;
    }
    void settle() {
        if (unsettled_ != nullptr) {
            wait_until(
                [&] { return try_settle(); },
                "waits for NCCL to launch a collective",
                unsettled_->number
            );
        }
    }

    /// Whether the results are final. @throws what ended this rank, if they never will be.
    [[nodiscard]] bool has_run(NcclLaunch& launch) {
        if (launch.state == NcclLaunch::State::launched) {
            cudaError_t const found = cudaEventQuery(launch.done);
            if (found == cudaSuccess) {
                launch.state = NcclLaunch::State::complete;
            } else if (found == cudaErrorNotReady) {
                static_cast<void>(cudaGetLastError()); // that is no error: nobody is to find one
                poll();
            } else {
                check(found, "cudaEventQuery");
            }
        }
        if (launch.state == NcclLaunch::State::lost) {
            std::rethrow_exception(failure_);
        }
        return launch.state == NcclLaunch::State::complete;
    }
    [[nodiscard]] bool has_caller_run() {
        cudaError_t const found = cudaStreamQuery(caller_);
        if (found == cudaErrorNotReady) {
            static_cast<void>(cudaGetLastError());
            throw_if_spent();
            return false;
        }
        check_stream(found, "cudaStreamQuery");
        return true;
    }

    /// Polls `ready()`, which throws where it finds that it never will be. `number` is that of the
    /// collective that this is about; 0: none.
    /// @throws TimedOut  after aborting.
    template <class Ready>
    void wait_until(Ready const& ready, std::string_view doing, std::uint64_t number) {
        auto const start = Clock::now();
        for (int turn = 0; !ready(); ++turn) {
            throw_if_spent();
            if (Clock::now() - start >= deadline_) {
                time_out(doing, number);
            }
            if (turn < spins) {
                std::this_thread::yield();
            } else {
                std::this_thread::sleep_for(nap);
            }
        }
    }
    [[noreturn]] void time_out(std::string_view doing, std::uint64_t number) {
        std::vector<int> const missing =
            number == 0 ? std::vector<int>{} : arrivals_.missing(size_, number);
        std::string who = "no answer";
        if (!missing.empty()) {
            who = concat(ranks_text(missing), " did not arrive");
        } else if (number != 0 && arrivals_.is_known()) {
            who = "all ranks arrived, but nothing came";
        }
        double const seconds = std::chrono::duration<double>(deadline_).count();
        fail(
            {FailureKind::timed_out,
             missing,
             concat(who, " within ", seconds, " s, while rank ", rank_, " ", doing)}
        );
    }
    static void require_ended(NcclLaunch const& launch) {
        if (launch.state == NcclLaunch::State::open) {
            throw ContractViolation{
                "this work is in a group that is still open, so it cannot be waited for: end the "
                "group first"
            };
        }
    }
    void order_after_caller() {
        cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
        check_stream(cudaStreamIsCapturing(caller_, &capture), "cudaStreamIsCapturing");
        if (capture != cudaStreamCaptureStatusNone) {
            throw ContractViolation{
                "the stream on which this communicator's data is made captures a CUDA graph, which "
                "cannot hold collectives: end the capture before them, or leave it to a "
                "CapturedStep"
            };
        }
        if (caller_ != stream_) {
            check_stream(cudaEventRecord(ready_, caller_), "cudaEventRecord");
            check(cudaStreamWaitEvent(stream_, ready_, 0), "cudaStreamWaitEvent");
        }
    }

    void let_go() noexcept {
        for (HoldsNcclKernels* const holder : holders_) {
            holder->let_go();
        }
    }
    /// NCCL's kernels end, and with an abort the handle is gone.
    void end_handle() noexcept {
        let_go();
        unsettled_ = nullptr;
        if (group_ != nullptr) { // of this thread: until it ends, NCCL aborts nothing
            group_ = nullptr;
            grouping_rank = nullptr;
            static_cast<void>(ncclGroupEnd());
        }
        launches_.for_each_unsettled([](NcclLaunch& launch) {
            launch.state = launch.has_run() ? NcclLaunch::State::complete : NcclLaunch::State::lost;
        });
        if (comm_ == nullptr) {
            return;
        }
        char const* const call = revokes_ ? "ncclCommRevoke" : "ncclCommAbort";
        ncclResult_t const result = revokes_ ? nccl_revoke(comm_) : ncclCommAbort(comm_);
        if (is_error(result)) {
            try {
                AbortReason reason = reason_of(failure_);
                reason.message += concat(
                    "; besides, ", call, " failed on rank ", rank_, ": ", ncclGetErrorString(result)
                );
                throw_failure(reason);
            } catch (...) {
                failure_ = std::current_exception();
            }
        }
        if (!revokes_) {
            comm_ = nullptr; // also if it failed: nobody knows what is left of it
        }
    }

    static constexpr int spins = 200;
    static constexpr std::chrono::microseconds nap{50};

    std::unique_ptr<NcclControl> control_;
    int rank_;
    int size_;
    int device_ = -1;
    std::chrono::nanoseconds deadline_;
    bool revokes_;
    cudaStream_t caller_;
    cudaStream_t stream_ = nullptr;
    bool owns_stream_ = false;
    cudaEvent_t ready_ = nullptr; ///< on the caller's stream, behind the data
    ncclComm_t comm_ = nullptr;
    NcclArrivals arrivals_;
    std::vector<HoldsNcclKernels*> holders_;
    NcclLaunches launches_;
    NcclLaunch* unsettled_ = nullptr; ///< NCCL may not have launched it yet; at most one
    NcclLaunch* group_ = nullptr;     ///< while a group is open
    std::uint64_t posted_ = 0;        ///< collectives
    std::exception_ptr failure_;      ///< what everything throws from now on
};

} // namespace joinable::inline v0::detail
