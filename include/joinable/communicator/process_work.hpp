// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdint>
#include <exception>
#include <utility>

#include <joinable/communicator/detail/board_communicator.hpp>
#include <joinable/communicator/detail/process_rank.hpp>

#if defined(__linux__) // elsewhere there are no process ranks

namespace joinable::inline v0 {

/// A collective between process ranks. Destroyed unfinished it waits up to the deadline; while
/// unwinding it aborts. When it is gone, no other rank touches this rank's buffers.
class [[nodiscard("destroying the work waits for it: wait() where it is needed")]] ProcessWork {
public:
    ProcessWork(ProcessWork&& other) noexcept
        : rank_{std::exchange(other.rank_, nullptr)}, sequence_{other.sequence_},
          exceptions_{other.exceptions_} {}
    ProcessWork& operator=(ProcessWork&&) = delete;

    ~ProcessWork() {
        if (rank_ == nullptr || rank_->is_done(sequence_)) {
            return;
        }
        try {
            if (std::uncaught_exceptions() > exceptions_) {
                rank_->abort_for_exception("a collective");
            }
            wait();
        } catch (...) { // NOLINT(bugprone-empty-catch): there is nobody to tell; all are awake
        }
    }

    /// Blocks until this rank's buffers are final. Waiting again returns at once, or throws again.
    /// @throws Mismatch  ranks said different things; no data moved.
    /// @throws TimedOut, PeerFailed, ...  what the communicator was aborted with, unless every rank
    ///         had arrived before and none died over its share of the work.
    void wait() { rank_->finish(sequence_); }
    /// Makes progress; true once wait() would return at once. @throws as wait() does.
    [[nodiscard]] bool test() { return rank_->test(sequence_); }

private:
    friend class detail::BoardCommunicator<detail::ProcessRank, ProcessWork>;
    ProcessWork(detail::ProcessRank& rank, std::uint64_t sequence) noexcept
        : rank_{&rank}, sequence_{sequence} {}

    detail::ProcessRank* rank_;
    std::uint64_t sequence_;
    int exceptions_ = std::uncaught_exceptions();
};

} // namespace joinable::inline v0

#endif
