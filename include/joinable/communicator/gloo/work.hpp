// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <utility>

#include <joinable/communicator/gloo/detail/operation.hpp>
#include <joinable/communicator/gloo/detail/rank.hpp>
#include <joinable/detail/unwinding.hpp>

namespace joinable { inline namespace v0 {

/// A collective of ranks that Gloo connects. The destructor of unfinished work waits up to the
/// deadline; during unwinding it aborts. After that nothing writes to this rank's buffer. The
/// communicator must outlive this object.
class [[nodiscard("destroying the work waits for it: wait() where it is needed")]] GlooWork {
public:
    GlooWork(GlooWork&& other) noexcept
        : rank_{std::exchange(other.rank_, nullptr)}, operation_{other.operation_},
          unwinding_{other.unwinding_} {}
    GlooWork& operator=(GlooWork&&) = delete;

    ~GlooWork() {
        if (rank_ == nullptr) {
            return;
        }
        try {
            if (!rank_->is_complete(*operation_)) {
                if (unwinding_.has_begun()) {
                    rank_->abort_for_exception("a collective");
                }
                wait();
            }
        } catch (...) { // NOLINT(bugprone-empty-catch): all ranks are told already
        }
        rank_->release(*operation_);
    }

    /// Blocks until this rank's buffers are final. Waiting again returns at once, or throws again.
    /// @throws Mismatch  the ranks' calls differ; no data moved.
    /// @throws TimedOut, PeerFailed, CommunicationError, ...  the reason why the communicator was
    ///         aborted, at once, unless this rank's part was complete before.
    void wait() { rank_->finish(*operation_); }
    /// True once wait() would return at once. The data moves without tests.
    /// @throws as wait() does; TimedOut while some rank has not arrived, once the time between
    ///         tests of this work adds up to the deadline. Each gap counts as at most 10 ms.
    [[nodiscard]] bool test() { return rank_->test(*operation_); }
    /// test() without that deadline, for a rank that finally waits.
    [[nodiscard]] bool progress() { return rank_->progress(*operation_); }

private:
    friend class GlooCommunicator;
    GlooWork(detail::GlooRank& rank, detail::GlooOperation& operation) noexcept
        : rank_{&rank}, operation_{&operation} {}

    detail::GlooRank* rank_;
    detail::GlooOperation* operation_;
    detail::Unwinding unwinding_;
};

}} // namespace joinable::v0
