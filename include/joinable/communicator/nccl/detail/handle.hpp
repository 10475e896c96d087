// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <nccl.h>

#include <joinable/communicator/nccl/detail/api.hpp>

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
    /// With `revokes`, a failure leaves the handle alive.
    explicit NcclHandle(bool revokes) noexcept : revokes_{revokes} {}

    [[nodiscard]] ncclComm_t get() const noexcept { return comm_; }
    /// The handle must be alive from here on.
    void adopt(ncclComm_t comm) noexcept { comm_ = comm; }
    [[nodiscard]] ncclComm_t give_up() noexcept { return std::exchange(comm_, nullptr); }

    void hold(HoldsNcclKernels& holder) { holders_.push_back(&holder); }
    void unhold(HoldsNcclKernels& holder) noexcept { std::erase(holders_, &holder); }
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

    /// For use after a failure. Kernels end, and so does the handle unless it is revoked. Returns
    /// the NCCL call that it made, and the result.
    [[nodiscard]] std::pair<std::string_view, ncclResult_t> end(std::chrono::nanoseconds deadline
    ) noexcept {
        if (comm_ == nullptr || revokes_) {
            return {"ncclCommRevoke", comm_ == nullptr ? ncclSuccess : revoke(deadline)};
        }
        return {"ncclCommAbort", ncclCommAbort(give_up())}; // if it fails, the state is unknown
    }
    /// NCCL frees the handle. NCCL cannot destroy a handle that is not ready, as after a network
    /// failure: it would leave a group open on this thread. `is_finalized`: all ranks have finished
    /// with it.
    void free(bool is_finalized) noexcept {
        if (comm_ != nullptr) {
            bool const is_ready = is_finalized && state() == ncclSuccess;
            ncclComm_t const last = give_up();
            static_cast<void>(is_ready ? ncclCommDestroy(last) : ncclCommAbort(last));
        }
    }

private:
    /// NCCL revokes on its own thread, which waits until the kernels have stopped. Until that
    /// thread has ended, no other call may use the handle, so this waits too, up to the deadline.
    [[nodiscard]] ncclResult_t revoke(std::chrono::nanoseconds deadline) const noexcept {
        ncclResult_t const result = nccl_revoke(comm_);
        if (is_error(result)) {
            return result;
        }
        auto const start = std::chrono::steady_clock::now();
        ncclResult_t now = state();
        while (now == ncclInProgress && std::chrono::steady_clock::now() - start < deadline) {
            std::this_thread::sleep_for(std::chrono::microseconds{50});
            now = state();
        }
        return now;
    }

    bool revokes_;
    ncclComm_t comm_ = nullptr;
    std::vector<HoldsNcclKernels*> holders_;
};

}}} // namespace joinable::v0::detail
