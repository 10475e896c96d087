// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/deadline.hpp>
#include <joinable/communicator/detail/work_of.hpp>
#include <joinable/communicator/nccl/detail/api.hpp>
#include <joinable/communicator/nccl/detail/control.hpp>
#include <joinable/communicator/nccl/detail/deadline.hpp>
#include <joinable/communicator/nccl/detail/handle.hpp>
#include <joinable/communicator/nccl/detail/launch.hpp>
#include <joinable/communicator/nccl/detail/streams.hpp>
#include <joinable/communicator/nccl/options.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/device/cuda/runtime.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/buffer.hpp>

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
