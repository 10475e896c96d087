// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <type_traits>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include <joinable/agreement/staged_collectives.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/checks.hpp>
#include <joinable/communicator/nccl/collectives.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/detail/unwinding.hpp>
#include <joinable/device/cuda/device.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/buffer.hpp>

namespace joinable { inline namespace v0 {

class StagedNcclCommunicator;

/// A collective of a StagedNcclCommunicator, which must outlive it. wait() blocks the host until
/// the result is in the host's buffer. The buffer must stay in place until then.
class [[nodiscard("destroying the work waits for it: wait() where it is needed")]] StagedNcclWork {
public:
    StagedNcclWork(StagedNcclWork&& other) noexcept
        : inner_{std::move(other.inner_)}, owner_{std::exchange(other.owner_, nullptr)} {}
    StagedNcclWork& operator=(StagedNcclWork&&) = delete;
    ~StagedNcclWork();

    /// Ends at the deadline. @throws as NcclWork::synchronize() does.
    void wait();
    /// True once the result is there. Blocks only while it copies the result.
    [[nodiscard]] bool test();
    /// test() without a deadline. @see NcclWork::progress
    [[nodiscard]] bool progress();

private:
    friend StagedNcclCommunicator;
    using Inner = detail::HostCollectives<NcclCollectives>::Work;
    StagedNcclWork(Inner inner, StagedNcclCommunicator& owner) noexcept
        : inner_{std::move(inner)}, owner_{&owner} {}

    Inner inner_;
    StagedNcclCommunicator* owner_;
};

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
/// One collective at a time, in addition to those of `comm`. It is for a few words, not for
/// gradients.
class StagedNcclCommunicator {
public:
    /// Local. `comm` must outlive this object.
    /// @throws CommunicationError  CUDA cannot create a stream; nothing is aborted.
    explicit StagedNcclCommunicator(NcclCollectives& comm) : comm_{comm} {
        detail::CurrentCudaDevice const current{comm.device()};
        detail::require_cuda(
            cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags"
        );
    }
    StagedNcclCommunicator(StagedNcclCommunicator const&) = delete;
    StagedNcclCommunicator& operator=(StagedNcclCommunicator const&) = delete;
    /// Waits for all outstanding work, because freeing device memory waits without a deadline.
    /// During unwinding it aborts.
    ~StagedNcclCommunicator() {
        if (unwinding_.has_begun()) {
            comm_.abort(detail::blamed_on(
                rank(),
                {FailureKind::peer_failed, {}, "an exception left the scope of its communicator"}
            ));
        } else {
            try {
                comm_.synchronize();
            } catch (...) { // NOLINT(bugprone-empty-catch): the failure has ended it on all ranks
            }
        }
        static_cast<void>(cudaStreamSynchronize(stream_)); // only copies, which need no other rank
        static_cast<void>(cudaStreamDestroy(stream_));
    }

    [[nodiscard]] int rank() const noexcept { return comm_.rank(); }
    [[nodiscard]] int size() const noexcept { return comm_.size(); }

    /// In place, on host memory.
    /// @throws ContractViolation  the last collective is not complete, or as NcclCommunicator.
    StagedNcclWork all_reduce(Buffer buffer, ReduceOp op) {
        return start(buffer, [&] { return words_.all_reduce(buffer, op); });
    }
    StagedNcclWork broadcast(Buffer buffer, int root) {
        return start(buffer, [&] { return words_.broadcast(buffer, root); });
    }
    void barrier() { comm_.barrier(); }

    void abort(AbortReason const& reason) { comm_.abort(reason); }
    [[nodiscard]] bool is_aborted() const { return comm_.is_aborted(); }
    /// Sets the deadline of `comm`, too.
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) noexcept {
        return comm_.set_deadline(deadline);
    }
    [[nodiscard]] std::vector<int> missing_ranks() const { return comm_.missing_ranks(); }

private:
    friend StagedNcclWork;

    template <class Start>
    StagedNcclWork start(Buffer buffer, Start const& start) {
        detail::check_memory(buffer);
        if (is_busy_) {
            throw ContractViolation{
                "a StagedNcclCommunicator has one collective at a time, but was given another one: "
                "wait for the last one first, and let its work go"
            };
        }
        StagedNcclWork work{on_stream(start), *this};
        is_busy_ = true;
        return work;
    }
    /// Runs f(), which copies on our stream. A CUDA error on one rank ends all ranks.
    template <class F>
    std::invoke_result_t<F const&> on_stream(F const& f) {
        struct Caller {
            ~Caller() { comm.set_stream(before); }
            NcclCollectives& comm;
            cudaStream_t before;
        } const caller{comm_, comm_.set_stream(stream_)};
        return comm_.rank_.on_device(f);
    }

    NcclCollectives& comm_;
    cudaStream_t stream_ = nullptr;
    detail::HostCollectives<NcclCollectives> words_{comm_};
    bool is_busy_ = false;
    detail::Unwinding unwinding_;
};

inline StagedNcclWork::~StagedNcclWork() {
    if (owner_ != nullptr) {
        owner_->is_busy_ = false;
    }
}
inline void StagedNcclWork::wait() {
    owner_->on_stream([&] { inner_.wait(); });
}
inline bool StagedNcclWork::test() {
    if (!inner_.test()) {
        return false;
    }
    wait();
    return true;
}
inline bool StagedNcclWork::progress() {
    return inner_.progress() && test();
}

}} // namespace joinable::v0
