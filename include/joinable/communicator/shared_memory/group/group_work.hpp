// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdint>
#include <utility>

#include <joinable/communicator/shared_memory/group/group_rank.hpp>
#include <joinable/detail/unwinding.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

template <class Rank, class Work>
class BoardCommunicator;

/// A collective or a message of one rank. Destroyed unfinished it waits up to the deadline; while
/// unwinding it aborts. When it is gone, no other rank touches this rank's buffers.
template <class Memory>
class [[nodiscard("destroying the work waits for it: wait() where it is needed")]] GroupWork {
public:
    GroupWork(GroupWork&& other) noexcept
        : rank_{std::exchange(other.rank_, nullptr)}, sequence_{other.sequence_},
          message_{other.message_}, is_lost_{other.is_lost_}, unwinding_{other.unwinding_} {}
    GroupWork& operator=(GroupWork&&) = delete;

    ~GroupWork() {
        if (rank_ == nullptr ||
            (is_message() ? message_.pending == nullptr : rank_->is_done(sequence_))) {
            return;
        }
        try {
            if (unwinding_.has_begun()) {
                rank_->abort_for_exception(is_message() ? "a message" : "a collective");
            }
            wait();
        } catch (...) { // NOLINT(bugprone-empty-catch): there is nobody to tell; all are awake
        }
    }

    /// Blocks until this rank's buffers are final. Waiting again returns at once, or throws again.
    /// @throws Mismatch  ranks said different things; no data moved.
    /// @throws TimedOut, PeerFailed, ...  what the communicator was aborted with, unless every rank
    ///         had arrived before and none died over its share of the work.
    void wait() {
        if (!is_message()) {
            rank_->finish(sequence_);
        } else if (message_.pending != nullptr) {
            is_lost_ = !rank_->finish_message(message_);
        }
        if (is_lost_) {
            throw_failure(rank_->group().loss(message_.peer));
        }
    }
    /// Makes progress; true once wait() would return at once. @throws as wait() does; TimedOut, while
    /// some rank has not arrived, once the time between tests of this work, each gap counted as at
    /// most 10 ms, adds up to the deadline.
    [[nodiscard]] bool test() {
        if (!is_message()) {
            return rank_->test(sequence_);
        }
        return progress() || (rank_->has_polled_message_too_long(message_) && progress());
    }
    /// The same without that deadline, for a rank that waits in the end.
    [[nodiscard]] bool progress() {
        if (!is_message()) {
            return rank_->progress(sequence_);
        }
        if (message_.pending != nullptr && !rank_->is_settled(message_)) {
            rank_->group().look_for_deaths(); // who polls may never wait
            return false;
        }
        wait();
        return true;
    }

private:
    template <class, class>
    friend class BoardCommunicator;
    GroupWork(GroupRank<Memory>& rank, std::uint64_t sequence) noexcept
        : rank_{&rank}, sequence_{sequence} {}
    GroupWork(GroupRank<Memory>& rank, Message const& message) noexcept
        : rank_{&rank}, message_{message} {}

    [[nodiscard]] bool is_message() const noexcept { return message_.peer >= 0; }

    GroupRank<Memory>* rank_;
    std::uint64_t sequence_ = 0;
    Message message_;
    bool is_lost_ = false;
    Unwinding unwinding_;
};

}}} // namespace joinable::v0::detail
