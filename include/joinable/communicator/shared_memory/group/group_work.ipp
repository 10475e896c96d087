// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/shared_memory/group/group_work.hpp>

#include <utility>

#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

template <class Memory>
GroupWork<Memory>::GroupWork(GroupWork&& other) noexcept
    : rank_{std::exchange(other.rank_, nullptr)}, sequence_{other.sequence_},
      message_{other.message_}, is_lost_{other.is_lost_}, unwinding_{other.unwinding_} {}

template <class Memory>
GroupWork<Memory>::~GroupWork() {
    if (rank_ == nullptr || !rank_->home().is_here() ||
        (is_message() ? message_.pending == nullptr : rank_->is_done(sequence_))) {
        return;
    }
    try {
        if (unwinding_.has_begun()) {
            rank_->abort_for_exception(is_message() ? "a message" : "a collective");
        }
        wait();
    } catch (...) { // NOLINT(bugprone-empty-catch): all ranks are told already
    }
}

template <class Memory>
void GroupWork<Memory>::wait() {
    if (!is_message()) {
        rank_->finish(sequence_);
    } else if (message_.pending != nullptr) {
        is_lost_ = !rank_->finish_message(message_);
    }
    if (is_lost_) {
        rank_->throw_loss(message_);
    }
}

template <class Memory>
bool GroupWork<Memory>::test() {
    if (!is_message()) {
        return rank_->test(sequence_);
    }
    return progress() || (rank_->has_polled_message_too_long(message_) && progress());
}

template <class Memory>
bool GroupWork<Memory>::progress() {
    if (!is_message()) {
        return rank_->progress(sequence_);
    }
    if (message_.pending != nullptr && !rank_->is_settled(message_)) {
        rank_->group().look_for_deaths(); // a rank that polls may never wait
        return false;
    }
    wait();
    return true;
}

template <class Memory>
GroupWork<Memory>::GroupWork(GroupRank<Memory>& rank, std::uint64_t sequence) noexcept
    : rank_{&rank}, sequence_{sequence} {}

template <class Memory>
GroupWork<Memory>::GroupWork(GroupRank<Memory>& rank, Message const& message) noexcept
    : rank_{&rank}, message_{message} {}

}}} // namespace joinable::v0::detail
