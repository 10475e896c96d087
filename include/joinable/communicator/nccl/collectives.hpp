// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/checks.hpp>
#include <joinable/communicator/detail/collective_members.hpp>
#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/nccl/detail/api.hpp>
#include <joinable/communicator/nccl/detail/arenas.hpp>
#include <joinable/communicator/nccl/detail/calls.hpp>
#include <joinable/communicator/nccl/detail/check.hpp>
#include <joinable/communicator/nccl/detail/control.hpp>
#include <joinable/communicator/nccl/detail/rank.hpp>
#include <joinable/communicator/nccl/group.hpp>
#include <joinable/communicator/nccl/options.hpp>
#include <joinable/communicator/nccl/work.hpp>
#include <joinable/detail/unwinding.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/device/cuda/device.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 {

namespace detail {
class NcclGraph;
} // namespace detail

/// The members that NcclCommunicator and NcclCommunicatorRef have in common.
///
/// Collectives run on the communicator's stream, each behind what was on the caller's stream when it
/// was called; NcclWork::wait() orders the caller's stream behind it. The host is blocked by barrier(),
/// synchronize(), split(), allocate(), register_arena(), the constructors, `check`, and while NCCL
/// launches what came before. Each of these waits ends with the deadline, with an error that NCCL
/// reports, or with an abort of any rank, which the control communicator carries. Nothing looks while
/// nobody waits: so wait for streams by synchronize(), not by cudaStreamSynchronize, which waits for
/// ranks that never come.
///
/// All members that take buffers throw ContractViolation before any data moves when counts or dtypes
/// do not fit, a root is no rank, memory is missing, overlaps, is the host's or another device's, or
/// the operation is one that NCCL does not have: bit_and, bit_or. How sums are ordered is NCCL's. The
/// factor of a scaled sum is rounded to the dtype.
class NcclCollectives : public detail::Collectives<NcclCollectives, NcclWork> {
public:
    using device_type = CudaDevice;

    NcclCollectives(NcclCollectives const&) = delete;
    NcclCollectives& operator=(NcclCollectives const&) = delete;

    [[nodiscard]] int rank() const noexcept { return rank_.rank(); }
    [[nodiscard]] int size() const noexcept { return rank_.size(); }

    [[nodiscard]] int device() const noexcept { return rank_.device(); }
    /// Null once the communicator is aborted, unless it revokes.
    [[nodiscard]] ncclComm_t native_handle() const noexcept { return rank_.handle(); }
    /// That of the collectives.
    [[nodiscard]] cudaStream_t stream() const noexcept { return rank_.stream(); }

    /// Local. From now on data is made and used on `caller`, which exists as long as it is the one: with
    /// a stream that was destroyed CUDA may do anything. Returns the stream on which data was made.
    cudaStream_t set_stream(cudaStream_t caller) noexcept {
        if (device_memory_) {
            device_memory_->set_streams(caller, caller);
        }
        return rank_.set_caller(caller);
    }
    /// What works in the memory of the device, on the caller's stream: for buckets. Without kernels
    /// (CudaDevice::use_kernels) gradients are scaled by NCCL, on their way.
    [[nodiscard]] CudaDevice& device_memory() {
        if (!device_memory_) {
            device_memory_.emplace(rank_.device(), rank_.caller(), rank_.caller());
        }
        return *device_memory_;
    }

    /// Local. Zeroed memory of the device, from NCCL's allocator: what register_arena() takes. Where
    /// that has none it is the device's own. An arena may outlive the communicator. Where it goes
    /// first, that makes the host wait for all collectives that are under way, up to the deadline; while
    /// unwinding it aborts them. A CapturedStep that uses it goes before it.
    /// @throws ContractViolation  alignment is no power of two. @throws CommunicationError  the
    ///         device has no room.
    [[nodiscard]] Arena
    allocate(std::size_t bytes, std::size_t alignment = Arena::default_alignment) {
        Arena arena = bytes == 0 ? Arena{} : arenas_.allocate(bytes, alignment);
        return arena.data() != nullptr ? std::move(arena)
                                       : device_memory().allocate(bytes, alignment);
    }
    /// Collective, blocks. Has NCCL map an arena of allocate() for all ranks, so that collectives read
    /// and write it where it is: as a symmetric window from NCCL 2.27 on. From then on all ranks give
    /// a collective buffers in it at the same offset. It lasts until the arena goes, or the
    /// communicator; with NcclOptions::revoke, after a failure, as long as the handle, which the
    /// arena then has to outlive. Once more is nothing. Returns false, on all ranks, if the arena of
    /// any rank is not NCCL's memory, or its NCCL registers nothing: then it is used as any other
    /// memory.
    /// @throws Mismatch  ranks give arenas of different sizes; nothing was registered.
    ///         CommunicationError, PeerFailed, TimedOut  after aborting, on all ranks: NCCL refuses on
    ///         any of them, after which its communicator takes nothing more.
    bool register_arena(Arena const& arena) { return arenas_.register_arena(arena); }

    /// A barrier of the hosts. Streams go on.
    void barrier() {
        rank_.over_control([](detail::NcclControl& control) { control.barrier(); });
    }

    /// Not collective, and not compared by `check`. NCCL has no tags: between two ranks, messages meet
    /// in the order of the calls, whatever their tags, and two ranks that send to each other do it in
    /// a group().
    NcclWork send(ConstBuffer buffer, int to, [[maybe_unused]] int tag = 0) {
        check(buffer);
        detail::check_rank("destination", to, size());
        check_other_side(to);
        return launch(0, "a message", [&](detail::NcclCalls const& nccl) {
            return nccl.send(buffer, to);
        });
    }
    /// The other side of send(): the same count and dtype, which NCCL does not compare.
    NcclWork receive(Buffer buffer, int from, [[maybe_unused]] int tag = 0) {
        check(buffer);
        detail::check_rank("source", from, size());
        check_other_side(from);
        return launch(0, "a message", [&](detail::NcclCalls const& nccl) {
            return nccl.receive(buffer, from);
        });
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
    [[nodiscard]] bool is_aborted() const { return rank_.is_aborted(); }

    /// Local; for waits that start later. Returns the deadline that was in force.
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) noexcept {
        return rank_.set_deadline(deadline);
    }
    /// Local. Says that this rank is still at work: the ranks that wait for it do so for one more
    /// deadline from now. Waits for collectives learn it where the control communicator models
    /// SharesMemory, those over the control communicator where it models RenewsDeadline.
    /// @throws ContractViolation  it models neither.
    void keep_alive() { rank_.keep_alive(); }
    /// Local. Who has not posted this rank's oldest unfinished collective; none, where the control
    /// communicator does not model SharesMemory.
    [[nodiscard]] std::vector<int> missing_ranks() const { return rank_.missing_ranks(); }

protected:
    NcclCollectives(std::unique_ptr<detail::NcclControl> control, NcclOptions const& options)
        : rank_{std::move(control), options}, checks_{options.check} {}
    ~NcclCollectives() = default;

    [[nodiscard]] bool is_unwinding() const noexcept { return unwinding_.has_begun(); }

    /// What the destructors do: see NcclRank::close.
    ncclComm_t close(bool owns_handle) noexcept {
        if (!is_unwinding()) {
            arenas_.deregister_all();
        }
        return rank_.close(is_unwinding(), owns_handle);
    }

    detail::NcclRank rank_;

private:
    friend class detail::NcclGraph;
    friend class StagedNcclCommunicator;
    friend class detail::BasicCollectives<NcclCollectives, NcclWork>;

    [[nodiscard]] NcclWork post(detail::Request const& request) {
        detail::Descriptor const& said = request.signature;
        rank_.check_memory(request.in);
        if (request.out.data != request.in.data || request.out.count != request.in.count) {
            rank_.check_memory(request.out);
        }
        if (said.is_reduction()) {
            static_cast<void>(detail::nccl_op(said.op)); // throws where NCCL has none
        }
        if (checks_) {
            detail::agree_on_collective(rank_, request);
        }
        return launch(1, name_of(said.collective), [&](detail::NcclCalls const& nccl) {
            return nccl.collective(request);
        });
    }
    template <class Call>
    [[nodiscard]] NcclWork
    launch(std::uint64_t collectives, std::string_view what, Call const& call) {
        detail::NcclLaunch& launched = rank_.post(collectives, [&] {
            rank_.check(call(detail::NcclCalls{rank_.handle(), rank_.stream(), size()}), what);
        });
        return {rank_, launched};
    }
    void check_other_side(int peer) const {
        if (peer == rank() && !rank_.has_group()) {
            throw ContractViolation{
                "with NCCL a message of a rank to itself needs its other side in the same group: "
                "call send() and receive() in a group()"
            };
        }
    }
    void check(ConstBuffer buffer) {
        detail::check_memory(buffer);
        rank_.check_memory(buffer);
    }

    bool checks_;
    detail::NcclArenas arenas_{rank_};
    std::optional<CudaDevice> device_memory_;
    detail::Unwinding unwinding_;
};

}} // namespace joinable::v0
