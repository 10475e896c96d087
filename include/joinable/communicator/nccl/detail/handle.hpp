// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
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
#include <joinable/communicator/nccl/detail/api.hpp>
#include <joinable/communicator/nccl/detail/control.hpp>
#include <joinable/communicator/nccl/options.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// What has kernels of NCCL for later, in a CUDA graph: NCCL frees no handle as long as there are any,
/// so they go before it, and before the windows that they use.
class HoldsNcclKernels {
public:
    /// May be called again.
    virtual void release_kernels() noexcept = 0;

protected:
    ~HoldsNcclKernels() = default;
};

/// NCCL's handle of one rank, beside the rank's control communicator, and what ended both: the first
/// failure of any rank, which everything throws from then on.
class NcclHandle {
public:
    NcclHandle(std::unique_ptr<NcclControl> control, NcclOptions const& options)
        : control_{std::move(control)}, rank_{control_->rank()}, size_{control_->size()},
          deadline_{options.deadline}, revokes_{options.revoke} {}
    NcclHandle(NcclHandle const&) = delete;
    NcclHandle& operator=(NcclHandle const&) = delete;

    [[nodiscard]] int rank() const noexcept { return rank_; }
    [[nodiscard]] int size() const noexcept { return size_; }
    [[nodiscard]] int device() const noexcept { return device_; }
    [[nodiscard]] ncclComm_t handle() const noexcept { return comm_; }
    [[nodiscard]] NcclControl& control() const noexcept { return *control_; }

    [[nodiscard]] std::chrono::nanoseconds deadline() const noexcept { return deadline_; }
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) noexcept {
        return std::exchange(deadline_, deadline);
    }

    /// The handle must be alive until it is given up, or until this rank is aborted.
    void adopt(ncclComm_t comm) noexcept { comm_ = comm; }

    void hold(HoldsNcclKernels& holder) { holders_.push_back(&holder); }
    void unhold(HoldsNcclKernels& holder) noexcept { std::erase(holders_, &holder); }
    /// Before anything goes that NCCL's kernels use.
    void release_kernels() noexcept {
        for (HoldsNcclKernels* const holder : holders_) {
            holder->release_kernels();
        }
    }

    [[nodiscard]] bool is_aborted() const { return failure_ != nullptr || control_->is_aborted(); }

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
    /// @throws ContractViolation  it is not this device's memory.
    void check_memory(ConstBuffer buffer) {
        if (buffer.count != 0) {
            cudaPointerAttributes found{};
            check(cudaPointerGetAttributes(&found, buffer.data), "cudaPointerGetAttributes");
            check_device_memory(buffer, found, device_);
        }
    }
    void throw_if_aborted(std::string_view error = asynchronous_error) {
        poll(error);
        if (failure_) {
            std::rethrow_exception(failure_);
        }
    }

    /// Runs f(control) with this rank's deadline; what that throws ends this rank, too.
    template <class F>
    void over_control(F const& f) {
        throw_if_aborted();
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

protected:
    static constexpr std::string_view asynchronous_error = "an asynchronous error";

    ~NcclHandle() = default;

    void set_device(int device) noexcept { device_ = device; }
    /// From here on there is none.
    [[nodiscard]] ncclComm_t give_up() noexcept { return std::exchange(comm_, nullptr); }
    [[noreturn]] void rethrow_failure() const { std::rethrow_exception(failure_); }

    /// Takes over what ended the others, and what NCCL found out by itself.
    void poll(std::string_view error = asynchronous_error) noexcept {
        if (failure_) {
            return;
        }
        try {
            if (control_->is_aborted()) {
                abort({FailureKind::communication, {}, "another rank aborted"});
            } else if (ncclResult_t const state = async_state(); is_error(state)) {
                check(state, error);
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

private:
    /// Called once, before the handle ends by a failure: what is under way is lost.
    virtual void lose_launches() noexcept = 0;

    /// NCCL's kernels end, and with an abort the handle is gone.
    void end_handle() noexcept {
        release_kernels();
        lose_launches();
        if (comm_ == nullptr) {
            return;
        }
        if (revokes_) {
            add_to_failure("ncclCommRevoke", revoke());
        } else {
            add_to_failure("ncclCommAbort", ncclCommAbort(comm_));
            comm_ = nullptr; // also if it failed: nobody knows what is left of it
        }
    }
    /// NCCL revokes by a thread of its own, which waits until the kernels have stopped. Until it has
    /// ended, no other call may use the handle: so this waits, too, up to the deadline.
    [[nodiscard]] ncclResult_t revoke() const noexcept {
        ncclResult_t const result = nccl_revoke(comm_);
        if (is_error(result)) {
            return result;
        }
        auto const start = std::chrono::steady_clock::now();
        ncclResult_t state = async_state();
        while (state == ncclInProgress && std::chrono::steady_clock::now() - start < deadline_) {
            std::this_thread::sleep_for(std::chrono::microseconds{50});
            state = async_state();
        }
        return state;
    }
    /// What ends the rank says what went wrong at its end, too.
    void add_to_failure(std::string_view call, ncclResult_t result) noexcept {
        if (result == ncclSuccess) {
            return;
        }
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

    std::unique_ptr<NcclControl> control_;
    int rank_;
    int size_;
    int device_ = -1;
    std::chrono::nanoseconds deadline_;
    bool revokes_;
    ncclComm_t comm_ = nullptr;
    std::vector<HoldsNcclKernels*> holders_;
    std::exception_ptr failure_; ///< what everything throws from now on
};

}}} // namespace joinable::v0::detail
