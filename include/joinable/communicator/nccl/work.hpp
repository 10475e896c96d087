// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <utility>

#include <cuda_runtime_api.h>

#include <joinable/communicator/detail/deadline.hpp>
#include <joinable/communicator/nccl/detail/launch.hpp>
#include <joinable/communicator/nccl/detail/rank.hpp>
#include <joinable/detail/scope.hpp>

namespace joinable { inline namespace v0 {

namespace detail {
class NcclHostWords;
} // namespace detail

/// A collective or a message on the stream of an NCCL communicator, which must outlive it.
///
/// wait() orders a stream after it; the host continues. Destroying it without a wait blocks the
/// host up to the deadline; during unwinding it aborts. After a wait, buffers may be freed in the
/// order of the stream that waits (cudaFreeAsync).
class [[nodiscard("destroying the work waits for it: wait() where it is needed")]] NcclWork {
public:
    NcclWork(NcclWork&& other) noexcept
        : rank_{std::exchange(other.rank_, nullptr)}, launch_{other.launch_},
          is_waited_for_{other.is_waited_for_}, unwinding_{other.unwinding_} {}
    NcclWork& operator=(NcclWork&&) = delete;

    ~NcclWork() {
        if (rank_ == nullptr || !rank_->is_here()) {
            return;
        }
        if (!is_waited_for_ && !launch_->is_final()) {
            try {
                if (unwinding_.has_begun()) {
                    abort_for_exception(*rank_, "a collective");
                } else {
                    rank_->synchronize(*launch_);
                }
            } catch (...) { // NOLINT(bugprone-empty-catch): all ranks are told already
            }
        }
        rank_->release(*launch_);
    }

    /// Later work on the caller's stream runs after the collective. The host waits only until NCCL
    /// has launched it.
    /// @throws TimedOut, PeerFailed, CommunicationError, ...  the reason why the communicator
    ///         ended, unless the results were final before; ContractViolation  its group is still
    ///         open.
    void wait() { wait(rank_->caller()); }
    /// The same for another stream than the communicator's caller stream.
    void wait(cudaStream_t stream) {
        rank_->require_no_error();
        rank_->order_before(*launch_, stream);
        is_waited_for_ = true;
    }
    /// True once the results are final. Does not block.
    /// @throws as wait() does; TimedOut, unless all ranks are known to have posted it, once the
    ///         time between tests of this work adds up to the deadline. Each gap counts as at most
    ///         10 ms.
    [[nodiscard]] bool test() {
        rank_->require_no_error();
        return rank_->test(*launch_, polled_);
    }
    /// test() without that deadline, for a rank that finally waits.
    [[nodiscard]] bool progress() {
        rank_->require_no_error();
        return rank_->test(*launch_);
    }
    /// Blocks the host until the results are final, up to the deadline.
    /// @throws as wait() does.
    void synchronize() {
        rank_->require_no_error();
        rank_->synchronize(*launch_);
        is_waited_for_ = true;
    }

private:
    friend class NcclCollectives;
    friend class detail::NcclHostWords;
    NcclWork(detail::NcclRank& rank, detail::NcclLaunch& launch) noexcept
        : rank_{&rank}, launch_{&launch} {}

    detail::NcclRank* rank_;
    detail::NcclLaunch* launch_;
    bool is_waited_for_ = false;
    detail::WaitClock polled_;
    detail::Unwinding unwinding_;
};

}} // namespace joinable::v0
