// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <utility>

#include <joinable/communicator/mpi/detail/operation.hpp>
#include <joinable/communicator/mpi/detail/rank.hpp>
#include <joinable/detail/unwinding.hpp>

namespace joinable { inline namespace v0 {

/// A collective or a message of MPI. The destructor of unfinished work waits up to the deadline;
/// during unwinding it aborts. After that nothing writes to this rank's buffer, unless the buffer
/// is in an arena. The communicator must outlive this object.
class [[nodiscard("destroying the work waits for it: wait() where it is needed")]] MpiWork {
public:
    MpiWork(MpiWork&& other) noexcept
        : rank_{std::exchange(other.rank_, nullptr)}, operation_{other.operation_},
          unwinding_{other.unwinding_} {}
    MpiWork& operator=(MpiWork&&) = delete;

    ~MpiWork() {
        if (rank_ == nullptr) {
            return;
        }
        auto const held = rank_->lock().take();
        try {
            if (operation_->state < detail::MpiOperation::State::complete) {
                if (unwinding_.has_begun()) {
                    rank_->abort_for_exception(
                        operation_->is_message() ? "a message" : "a collective"
                    );
                }
                rank_->finish(*operation_);
            }
        } catch (...) { // NOLINT(bugprone-empty-catch): all ranks are told already
        }
        rank_->release(*operation_);
    }

    /// Blocks until this rank's buffers are final. Waiting again returns at once, or throws again.
    /// @throws Mismatch  the ranks' calls differ, if the ranks compare them; no data moved.
    /// @throws TimedOut, PeerFailed, CommunicationError, ...  the reason why the communicator was
    ///         aborted, at once, unless this rank's part was complete before.
    void wait() {
        auto const held = rank_->lock().take();
        rank_->finish(*operation_);
    }
    /// Makes progress; true once wait() would return at once.
    /// @throws as wait() does; TimedOut while some rank has not arrived, once the time between
    ///         tests of this work adds up to the deadline and the ranks have had 2 s to answer.
    ///         Each gap counts as at most 10 ms.
    [[nodiscard]] bool test() {
        auto const held = rank_->lock().take();
        return rank_->test(*operation_);
    }
    /// test() without that deadline, for a rank that finally waits.
    [[nodiscard]] bool progress() {
        auto const held = rank_->lock().take();
        return rank_->progress(*operation_);
    }

private:
    friend class MpiCommunicator;
    MpiWork(detail::MpiRank& rank, detail::MpiOperation& operation) noexcept
        : rank_{&rank}, operation_{&operation} {}

    detail::MpiRank* rank_;
    detail::MpiOperation* operation_;
    detail::Unwinding unwinding_;
};

}} // namespace joinable::v0
