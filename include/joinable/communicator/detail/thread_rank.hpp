// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <joinable/communicator/detail/endpoint.hpp>
#include <joinable/communicator/detail/mailbox.hpp>
#include <joinable/communicator/detail/thread_group.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable::inline v0::detail {

/// What one thread has of its group: what its communicator and its works have in common.
class ThreadRank : public Endpoint<ThreadGroup> {
public:
    ThreadRank(std::shared_ptr<ThreadGroup> group, int rank) noexcept
        : Endpoint{*group, rank}, group_{std::move(group)} {}

    [[nodiscard]] ThreadGroup& group() const noexcept { return *group_; }

    /// Tells the others that an exception is leaving `what` on this rank.
    void abort_for_exception(std::string const& what) {
        group_->abort(
            blamed_on(rank(), {FailureKind::peer_failed, {}, "an exception left " + what}), rank()
        );
    }

    /// Leaves `buffer` for `peer`, or takes it at once: then there is no letter.
    /// @throws Mismatch  the other side has another count or dtype; on both.
    [[nodiscard]] Letter* post_message(bool is_send, int peer, int tag, Buffer buffer) {
        auto const [letter, mismatch] = mailbox(is_send, peer).post(is_send, tag, buffer);
        if (!mismatch.empty()) {
            AbortReason const reason{
                FailureKind::mismatch,
                {rank(), peer},
                concat("messages between rank ", rank(), " and rank ", peer, ": ", mismatch)
            };
            group_->abort(reason, rank());
            throw_failure(reason);
        }
        group_->board().room.wake();
        return letter;
    }

    /// Whether waiting for the letter would return at once, or throw.
    [[nodiscard]] bool is_settled(Letter const& letter, int peer) const noexcept {
        return letter.state.load() == Letter::State::done || group_->is_lost(peer);
    }

    /// Blocks until the letter is settled, and gives it back. Whether it was delivered: if not,
    /// group().loss(peer) says why.
    [[nodiscard]] bool finish_message(Letter& letter, int peer) {
        if (!is_settled(letter, peer)) {
            wait_for_others(
                [&] { return is_settled(letter, peer); },
                [&] { return is_settled(letter, peer) ? std::vector<int>{} : std::vector{peer}; },
                letter.is_send ? "receive" : "send",
                [&] { return "waits in " + letter.text(); }
            );
        }
        return mailbox(letter.is_send, peer).take_back(letter);
    }

private:
    [[nodiscard]] Mailbox& mailbox(bool is_send, int peer) noexcept {
        return is_send ? group_->mailbox(rank(), peer) : group_->mailbox(peer, rank());
    }

    std::shared_ptr<ThreadGroup> group_;
};

} // namespace joinable::inline v0::detail
