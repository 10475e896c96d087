// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdint>
#include <exception>
#include <utility>

#include <joinable/communicator/detail/tcp_rank.hpp>

#if defined(__linux__) // elsewhere there are no such sockets

namespace joinable::inline v0 {

/// A collective of ranks that are connected by TCP. Destroyed unfinished it waits up to the deadline;
/// while unwinding it aborts. When it is gone, nothing writes to this rank's buffer any more.
class [[nodiscard("destroying the work waits for it: wait() where it is needed")]] TcpWork {
public:
    TcpWork(TcpWork&& other) noexcept
        : rank_{std::exchange(other.rank_, nullptr)}, sequence_{other.sequence_},
          exceptions_{other.exceptions_} {}
    TcpWork& operator=(TcpWork&&) = delete;

    ~TcpWork() {
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

    /// Blocks until this rank's buffer is final. Waiting again returns at once, or throws again.
    /// @throws Mismatch  ranks said different things; no data moved.
    /// @throws TimedOut, PeerFailed, ...  what the communicator was aborted with, unless every rank
    ///         had arrived before.
    void wait() { rank_->finish(sequence_); }
    /// Makes progress; true once wait() would return at once. @throws as wait() does.
    [[nodiscard]] bool test() { return rank_->test(sequence_); }

private:
    friend class TcpCommunicator;
    TcpWork(detail::TcpRank& rank, std::uint64_t sequence) noexcept
        : rank_{&rank}, sequence_{sequence} {}

    detail::TcpRank* rank_;
    std::uint64_t sequence_;
    int exceptions_ = std::uncaught_exceptions();
};

} // namespace joinable::inline v0

#endif
