// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdint>
#include <exception>
#include <utility>

#include <joinable/communicator/detail/thread_rank.hpp>
#include <joinable/error.hpp>

namespace joinable::inline v0 {

namespace detail {
template <class Rank, class Work>
class BoardCommunicator;
} // namespace detail

/// A collective or a message between thread ranks. Destroyed unfinished it waits up to the
/// deadline; while unwinding it aborts. When it is gone, no other rank touches this rank's buffers.
class [[nodiscard("destroying the work waits for it: wait() where it is needed")]] ThreadWork {
public:
    ThreadWork(ThreadWork&& other) noexcept
        : rank_{std::exchange(other.rank_, nullptr)}, sequence_{other.sequence_},
          letter_{other.letter_}, peer_{other.peer_}, exceptions_{other.exceptions_} {}
    ThreadWork& operator=(ThreadWork&&) = delete;

    ~ThreadWork() {
        if (rank_ == nullptr || (peer_ < 0 && rank_->is_done(sequence_)) ||
            (peer_ >= 0 && letter_ == nullptr)) {
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
    ///         had arrived before.
    void wait() {
        if (peer_ < 0) {
            rank_->finish(sequence_);
        } else if (letter_ != nullptr) {
            is_lost_ = !rank_->finish_message(*letter_, peer_);
            letter_ = nullptr;
        }
        if (is_lost_) {
            throw_failure(rank_->group().loss(peer_));
        }
    }
    /// Makes progress; true once wait() would return at once. @throws as wait() does.
    [[nodiscard]] bool test() {
        if (peer_ < 0) {
            return rank_->test(sequence_);
        }
        if (letter_ != nullptr && !rank_->is_settled(*letter_, peer_)) {
            return false;
        }
        wait();
        return true;
    }

private:
    friend class ThreadCommunicator;
    friend class detail::BoardCommunicator<detail::ThreadRank, ThreadWork>;
    ThreadWork(detail::ThreadRank& rank, std::uint64_t sequence) noexcept
        : rank_{&rank}, sequence_{sequence} {}
    ThreadWork(detail::ThreadRank& rank, detail::Letter* letter, int peer) noexcept
        : rank_{&rank}, letter_{letter}, peer_{peer} {}

    detail::ThreadRank* rank_;
    std::uint64_t sequence_ = 0;
    detail::Letter* letter_ = nullptr; ///< of a message that is not finished
    int peer_ = -1;                    ///< of a message
    bool is_lost_ = false;
    int exceptions_ = std::uncaught_exceptions();
};

} // namespace joinable::inline v0
