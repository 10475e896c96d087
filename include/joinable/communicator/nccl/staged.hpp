// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/checks.hpp>
#include <joinable/communicator/nccl/collectives.hpp>
#include <joinable/communicator/nccl/work.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/detail/unwinding.hpp>
#include <joinable/device/cuda/device.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/buffer.hpp>

namespace joinable { inline namespace v0 {

class StagedNcclCommunicator;

/// A collective of a StagedNcclCommunicator, which it must not outlive. To wait for it is to make the
/// host wait: then the result is in the host's buffer, which stays where it is until then.
class [[nodiscard("destroying the work waits for it: wait() where it is needed")]] StagedNcclWork {
public:
    StagedNcclWork(StagedNcclWork&& other) noexcept
        : inner_{std::move(other.inner_)}, owner_{std::exchange(other.owner_, nullptr)},
          host_{other.host_}, is_copied_{other.is_copied_} {}
    StagedNcclWork& operator=(StagedNcclWork&&) = delete;
    ~StagedNcclWork();

    /// Up to the deadline. @throws as NcclWork::synchronize() does.
    void wait();
    /// True once the result is there. Blocks for no longer than a copy of it.
    [[nodiscard]] bool test();
    /// The same without a deadline. @see NcclWork::progress
    [[nodiscard]] bool progress();

private:
    friend StagedNcclCommunicator;
    StagedNcclWork(NcclWork inner, StagedNcclCommunicator& owner, Buffer host) noexcept
        : inner_{std::move(inner)}, owner_{&owner}, host_{host} {}

    NcclWork inner_;
    StagedNcclCommunicator* owner_;
    Buffer host_;
    bool is_copied_ = false;
};

/// NCCL ranks as a communicator of the host, for the roll calls of a guard that has no communicator of
/// the host at hand: the one of NcclCommunicator::from_environment() is its own.
///
/// @code
/// auto comm = joinable::NcclCommunicator::from_environment();
/// joinable::StagedNcclCommunicator staged{comm};
/// joinable::Join guard{joinable::participants(ddp), joinable::control(staged)};
/// @endcode
///
/// Each collective is a copy to the device, an all-reduce or broadcast of NCCL behind all that NCCL has
/// been given before, and a copy back, for which the host waits: where a host communicator answers a
/// roll call while the device computes, this one answers when the last round's gradients are through.
/// It does not wait for the engine's stream. Prefer control() with a communicator of the host.
///
/// NCCL does not end a collective on all ranks at once. So if a rank aborts right after a roll call, one
/// that has not seen its answer throws the abort's reason instead.
///
/// One collective at a time, beside what `comm` does itself: for few words, not for gradients.
class StagedNcclCommunicator {
public:
    /// Local. `comm` outlives this.
    /// @throws CommunicationError  no stream is to be had; nothing is aborted.
    explicit StagedNcclCommunicator(NcclCollectives& comm) : comm_{comm} {
        detail::CurrentCudaDevice const current{comm.device()};
        detail::require_cuda(
            cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags"
        );
    }
    StagedNcclCommunicator(StagedNcclCommunicator const&) = delete;
    StagedNcclCommunicator& operator=(StagedNcclCommunicator const&) = delete;
    /// Waits for all that is under way, as to free memory of a device does without a deadline. While
    /// unwinding it aborts.
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
        static_cast<void>(cudaStreamSynchronize(stream_)); // copies, which wait for nobody
        for (Staging const& staging : stagings_) {
            static_cast<void>(cudaFree(staging.device));
            static_cast<void>(cudaFreeHost(staging.host));
        }
        static_cast<void>(cudaStreamDestroy(stream_));
    }

    [[nodiscard]] int rank() const noexcept { return comm_.rank(); }
    [[nodiscard]] int size() const noexcept { return comm_.size(); }

    /// In place, of memory of the host.
    /// @throws ContractViolation  the last one is not over yet, or as NcclCommunicator.
    StagedNcclWork all_reduce(Buffer buffer, ReduceOp op) {
        return start(buffer, [&](Buffer there) { return comm_.all_reduce(there, op); });
    }
    StagedNcclWork broadcast(Buffer buffer, int root) {
        return start(buffer, [&](Buffer there) { return comm_.broadcast(there, root); });
    }
    void barrier() { comm_.barrier(); }

    void abort(AbortReason const& reason) { comm_.abort(reason); }
    [[nodiscard]] bool is_aborted() const { return comm_.is_aborted(); }
    /// Of `comm`, too.
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) noexcept {
        return comm_.set_deadline(deadline);
    }
    [[nodiscard]] std::vector<int> missing_ranks() const { return comm_.missing_ranks(); }

private:
    friend StagedNcclWork;

    /// The same bytes in pinned memory, which a copy that is under way may keep, and on the device.
    struct Staging {
        std::size_t bytes;
        void* host;
        void* device;
    };

    template <class Start>
    StagedNcclWork start(Buffer buffer, Start const& start) {
        detail::check_memory(buffer);
        if (is_busy_) {
            throw ContractViolation{
                "a StagedNcclCommunicator has one collective at a time, but was given another one: "
                "wait for the last one first, and let its work go"
            };
        }
        reserve(buffer.bytes());
        if (buffer.count != 0) {
            std::memcpy(stagings_.back().host, buffer.data, buffer.bytes());
            check(
                cudaMemcpyAsync(
                    stagings_.back().device,
                    stagings_.back().host,
                    buffer.bytes(),
                    cudaMemcpyHostToDevice,
                    stream_
                ),
                "cudaMemcpyAsync"
            );
        }
        struct Caller { // whose data comes from our stream, for this collective alone
            ~Caller() { comm.set_stream(before); }
            NcclCollectives& comm;
            cudaStream_t before;
        } const caller{comm_, comm_.set_stream(stream_)};
        StagedNcclWork work{
            start({stagings_.back().device, buffer.count, buffer.dtype}), *this, buffer
        };
        is_busy_ = true;
        return work;
    }
    /// Nothing is freed before the end, as that would wait for NCCL, however long.
    void reserve(std::size_t bytes) {
        constexpr std::size_t least = 1024;
        std::size_t const given = stagings_.empty() ? 0 : stagings_.back().bytes;
        if (given >= (std::max)(bytes, least)) {
            return;
        }
        stagings_.push_back({(std::max)({bytes, least, 2 * given}), nullptr, nullptr});
        Staging& made = stagings_.back();
        try {
            detail::CurrentCudaDevice const current{comm_.device()};
            detail::require_cuda(cudaMallocHost(&made.host, made.bytes), "cudaMallocHost");
            detail::require_cuda(cudaMalloc(&made.device, made.bytes), "cudaMalloc");
        } catch (CommunicationError const& error) {
            fail(error.what());
        }
    }
    /// To the host, when the collective has run: so this waits for nothing but the copy.
    void download(Buffer host) {
        if (host.count != 0) {
            Staging const& staging = stagings_.back();
            check(
                cudaMemcpyAsync(
                    staging.host, staging.device, host.bytes(), cudaMemcpyDeviceToHost, stream_
                ),
                "cudaMemcpyAsync"
            );
            check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
            std::memcpy(host.data, staging.host, host.bytes());
        }
    }
    /// An error of CUDA on one rank ends all.
    void check(cudaError_t error, std::string_view call) {
        try {
            detail::require_cuda(error, call);
        } catch (CommunicationError const& failure) {
            fail(failure.what());
        }
    }
    [[noreturn]] void fail(std::string_view text) {
        AbortReason const reason{
            FailureKind::communication, {}, detail::concat("rank ", rank(), ": ", text)
        };
        comm_.abort(reason);
        comm_.barrier(); // throws what came first
        throw CommunicationError{reason.message};
    }

    NcclCollectives& comm_;
    cudaStream_t stream_ = nullptr;
    std::vector<Staging> stagings_; ///< the last one is in use
    bool is_busy_ = false;
    detail::Unwinding unwinding_;
};

inline StagedNcclWork::~StagedNcclWork() {
    if (owner_ != nullptr) {
        owner_->is_busy_ = false;
    }
}
inline void StagedNcclWork::wait() {
    inner_.synchronize();
    if (!is_copied_) {
        owner_->download(host_);
        is_copied_ = true;
    }
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
