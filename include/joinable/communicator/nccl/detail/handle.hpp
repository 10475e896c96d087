// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include <nccl.h>

#include <joinable/communicator/nccl/detail/api.hpp>
#include <joinable/device/cuda/runtime.hpp>

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
