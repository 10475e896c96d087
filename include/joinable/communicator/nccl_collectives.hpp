// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <exception>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/nccl_control.hpp>
#include <joinable/communicator/detail/nccl_exchanges.hpp>
#include <joinable/communicator/nccl_group.hpp>
#include <joinable/communicator/nccl_options.hpp>
#include <joinable/device/cuda_device.hpp>

namespace joinable::inline v0 {

namespace detail {
class NcclGraph;
} // namespace detail

/// The members that NcclCommunicator and NcclCommunicatorRef have in common.
///
/// Collectives run on the communicator's stream, each behind what was on the caller's stream when it
/// was called; NcclWork::wait() orders the caller's stream behind it. The host is blocked by barrier(),
/// synchronize(), split(), the constructors, `check`, and while NCCL launches what came before. Each
/// of these waits ends with the deadline, with an error that NCCL reports, or with an abort of any rank,
/// which the control communicator carries. Nothing looks while nobody waits: so wait for streams by
/// synchronize(), not by cudaStreamSynchronize, which waits for ranks that never come.
///
/// All members that take buffers throw ContractViolation before any data moves when counts or dtypes
/// do not fit, a root is no rank, memory is missing, overlaps, is the host's or another device's, or
/// the operation is one that NCCL does not have: bit_and, bit_or. How sums are ordered is NCCL's.
class NcclCollectives : public detail::NcclExchanges {
public:
    using device_type = CudaDevice;

    [[nodiscard]] int device() const noexcept { return rank_.device(); }
    /// Null once the communicator is spent, unless it revokes.
    [[nodiscard]] ncclComm_t native_handle() const noexcept { return rank_.handle(); }
    /// That of the collectives.
    [[nodiscard]] cudaStream_t stream() const noexcept { return rank_.stream(); }

    /// Local. From now on data is made and used on `caller`. Returns the stream on which it was.
    cudaStream_t set_stream(cudaStream_t caller) noexcept { return rank_.set_caller(caller); }
    /// What works in the memory of the device, on the caller's stream: for buckets. Without kernels
    /// (CudaDevice::use_kernels) gradients are scaled by NCCL, on their way.
    [[nodiscard]] CudaDevice& device_memory() {
        if (!device_memory_) {
            device_memory_.emplace(rank_.device(), rank_.caller(), rank_.caller());
        }
        device_memory_->set_streams(rank_.caller(), rank_.caller());
        return *device_memory_;
    }

    /// Of the hosts: streams go on.
    void barrier() {
        rank_.over_control([](detail::NcclControl& control) { control.barrier(); });
    }

    /// What follows is launched as one when the token goes. The same collectives on every rank.
    [[nodiscard]] NcclGroup group() { return NcclGroup{rank_}; }

    /// Makes the host wait until everything that was posted has run, and what is on the caller's
    /// stream, up to the deadline.
    /// @throws TimedOut, PeerFailed, ...  after which the streams are not stuck any more.
    void synchronize() { rank_.synchronize(); }

    /// Local. Ends what is under way, here and by the control communicator on all ranks; the first
    /// reason wins. NCCL's handle is freed, unless it is revoked: an engine whose handle it is must not
    /// destroy it.
    void abort(AbortReason const& reason) { rank_.abort(reason); }
    [[nodiscard]] bool is_spent() const { return rank_.is_spent(); }

    /// Local; for waits that start later. Returns the deadline that was in force.
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) noexcept {
        return rank_.set_deadline(deadline);
    }
    /// Local. Who has not posted this rank's oldest unfinished collective; none, where the control
    /// communicator does not model SharesMemory.
    [[nodiscard]] std::vector<int> missing() const { return rank_.missing(); }

protected:
    NcclCollectives(std::unique_ptr<detail::NcclControl> control, NcclOptions const& options)
        : NcclExchanges{std::move(control), options} {}
    ~NcclCollectives() = default;

    [[nodiscard]] bool is_unwinding() const noexcept {
        return std::uncaught_exceptions() > exceptions_;
    }

private:
    friend class detail::NcclGraph;

    std::optional<CudaDevice> device_memory_;
    int exceptions_ = std::uncaught_exceptions();
};

} // namespace joinable::inline v0
