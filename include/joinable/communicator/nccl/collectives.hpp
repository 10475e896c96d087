// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <utility>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/collective_members.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/detail/transport.hpp>
#include <joinable/communicator/nccl/detail/api.hpp>
#include <joinable/communicator/nccl/detail/arenas.hpp>
#include <joinable/communicator/nccl/detail/calls.hpp>
#include <joinable/communicator/nccl/detail/control.hpp>
#include <joinable/communicator/nccl/detail/device.hpp>
#include <joinable/communicator/nccl/detail/host_words.hpp>
#include <joinable/communicator/nccl/detail/launch.hpp>
#include <joinable/communicator/nccl/detail/post.hpp>
#include <joinable/communicator/nccl/detail/rank.hpp>
#include <joinable/communicator/nccl/detail/setup.hpp>
#include <joinable/communicator/nccl/options.hpp>
#include <joinable/communicator/nccl/work.hpp>
#include <joinable/detail/scope.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/device/cuda/device.hpp>
#include <joinable/error.hpp>

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
