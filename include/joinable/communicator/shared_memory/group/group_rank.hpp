// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <joinable/communicator/detail/deadline.hpp>
#include <joinable/communicator/detail/reasons.hpp>
#include <joinable/communicator/shared_memory/engine/endpoint.hpp>
#include <joinable/communicator/shared_memory/engine/lent_memory.hpp>
#include <joinable/communicator/shared_memory/group/group.hpp>
#include <joinable/communicator/shared_memory/group/group_storage.hpp>
#include <joinable/communicator/shared_memory/group/mailbox.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// What one side knows of its message.
struct Message {
    bool is_send = false;
    int peer = -1; ///< the rank of the other side
    int tag = 0;
    Buffer buffer = {};
    PendingMessage* pending = nullptr; ///< while it waits; without one it is delivered
    PolledTime polled = {};

    [[nodiscard]] std::string text() const {
        return text_of(is_send, tag, buffer.count, buffer.dtype);
    }
};

/// One rank of a group: what its communicator and its works have in common.
///
/// The second rank to arrive copies the message, so no background progress is needed and a busy rank
/// delays nobody. Where ranks do not reach each other's buffers, the first one leaves a copy in memory
/// that both reach, or room for one.
template <class Memory>
class GroupRank : public Endpoint<Group, LentBy<Memory>> {
    using Base = Endpoint<Group, LentBy<Memory>>;

public:
    GroupRank(Group group, int rank, std::shared_ptr<GroupStorage<Memory>> storage)
        : Base{group, rank, LentBy<Memory>{std::shared_ptr<Memory>{storage, &storage->memory()}}},
          group_{group}, storage_{std::move(storage)} {}

    [[nodiscard]] Group const& group() const noexcept { return group_; }
    [[nodiscard]] std::shared_ptr<GroupStorage<Memory>> const& storage() const noexcept {
        return storage_;
    }

    /// Tells the others that an exception is leaving `what` on this rank.
    void abort_for_exception(std::string const& what) {
        group_.abort(
            blamed_on(this->rank(), {FailureKind::peer_failed, {}, "an exception left " + what}),
            this->rank()
        );
    }

    /// The group of these ranks of this group, in their order, of which this is the first; as its
    /// place relative to this board. 0: there is no memory.
    /// @throws PeerFailed, ...  this group was aborted.
    [[nodiscard]] std::uint64_t make_group(std::vector<int> members) {
        for (int& member : members) {
            member = group_.number_of(member);
        }
        std::optional<Group> made;
        try {
            made = storage_->make(members, members.front());
        } catch (std::bad_alloc const&) { // NOLINT(bugprone-empty-catch): all members hear of it
        }
        if (!made) {
            return 0;
        }
        if (!group_.adopt(*made)) {
            throw_failure(group_.loss(this->rank()));
        }
        return group_.board().place_of(&made->board());
    }

    /// Leaves a message for the other side, or delivers at once.
    /// @throws Mismatch           the other side has another count or dtype; on both, unless the group
    ///                            had failed before.
    /// @throws ContractViolation  the memory for this rank's messages is in use.
    [[nodiscard]] Message post_message(bool is_send, int peer, int tag, Buffer buffer) {
        Message message{is_send, peer, tag, buffer};
        PendingMessage* other = meet(message);
        if (other == nullptr) {
            message.pending = &write_message(message);
            other = meet(message); // which may have come meanwhile
        }
        if (other != nullptr) {
            deliver(message, *other);
            throw_away(message);
            group_.board().room.wake();
        }
        return message;
    }

    /// Whether waiting for the message would return at once, or throw.
    [[nodiscard]] bool is_settled(Message const& message) const noexcept {
        switch (message.pending->state.load()) {
        case PendingMessage::State::waiting: return group_.is_lost(message.peer);
        case PendingMessage::State::taken: return group_.board().is_dead(message.peer);
        case PendingMessage::State::done: break;
        }
        return true;
    }

    /// Blocks until the message is settled; then nobody touches its buffer any more. Whether it was
    /// delivered: if not, group().loss(peer) says why.
    [[nodiscard]] bool finish_message(Message& message) {
        if (!is_settled(message)) {
            this->wait_for_others(
                [&] { return !waits(message) || group_.is_lost(message.peer); },
                [&] { return missing_in(message); },
                what_is_missing(message),
                [&] { return "waits in " + message.text(); }
            );
        }
        bool const has_come = is_delivered(message);
        if (has_come && !message.is_send && !is_in_reach(message.buffer)) {
            copy(message.buffer.data, data_of(*message.pending), message.buffer.bytes());
        }
        throw_away(message);
        return has_come;
    }

    /// Whether a message that was found not to be settled has been polled for the deadline: then the
    /// group is aborted.
    [[nodiscard]] bool has_polled_message_too_long(Message& message) {
        return this->has_polled_too_long(
            message.polled,
            [&] { return missing_in(message); },
            what_is_missing(message),
            [&] { return "waits in " + message.text(); }
        );
    }

private:
    using State = PendingMessage::State;

    [[nodiscard]] static bool waits(Message const& message) noexcept {
        return message.pending->state.load() == State::waiting;
    }
    [[nodiscard]] static std::vector<int> missing_in(Message const& message) {
        return waits(message) ? std::vector{message.peer} : std::vector<int>{};
    }
    [[nodiscard]] static char const* what_is_missing(Message const& message) noexcept {
        return message.is_send ? "receive" : "send";
    }

    /// @throws CommunicationError  there is no memory for it, which only the first message may need.
    [[nodiscard]] Mailbox& mailbox_of(Message const& message) {
        auto const peer = static_cast<std::size_t>(message.peer);
        Mailbox& mailbox = message.is_send ? group_.mailbox(this->rank(), message.peer)
                                           : group_.mailbox(message.peer, this->rank());
        std::vector<bool>& reserved = mailboxes_[message.is_send ? 1 : 0];
        reserved.resize(static_cast<std::size_t>(this->size()));
        if (!reserved[peer]) {
            group_.reserve(&mailbox, sizeof mailbox);
            reserved[peer] = true;
        }
        return mailbox;
    }
    [[nodiscard]] std::byte* data_of(PendingMessage const& pending) noexcept {
        return group_.board().place_at(pending.data);
    }
    static void copy(void* to, void const* from, std::size_t bytes) noexcept {
        if (bytes != 0) {
            std::memmove(to, from, bytes); // a rank may send to itself
        }
    }

    /// Waits until the mailbox is this rank's, or nothing can come of it. Whether it is this rank's.
    [[nodiscard]] bool lock(Mailbox& mailbox, int peer) {
        bool is_mine = mailbox.try_lock();
        if (!is_mine) {
            this->wait_for_others(
                [&] { return (is_mine = mailbox.try_lock()) || group_.is_lost(peer); },
                [&] { return std::vector{peer}; },
                "let a mailbox go",
                [] { return "waits for it"; }
            );
        }
        return is_mine;
    }

    void unlock(Mailbox& mailbox) noexcept {
        mailbox.unlock();
        group_.board().room.wake(); // a rank that waits for it, whatever becomes of this message
    }

    /// Takes the message of the other side, if there is one, else leaves this side's, if it is written.
    [[nodiscard]] PendingMessage* meet(Message& message) {
        Board& board = group_.board();
        Mailbox& mailbox = mailbox_of(message);
        if (!lock(mailbox, message.peer)) {
            throw_away(message);
            throw_failure(group_.loss(message.peer));
        }
        PendingMessage* const other = mailbox.find(board, message.is_send, message.tag);
        if (other != nullptr) {
            Message const theirs{
                !message.is_send, this->rank(), other->tag, {nullptr, other->count, other->dtype}
            };
            if (other->count != message.buffer.count || other->dtype != message.buffer.dtype) {
                unlock(mailbox);
                throw_away(message);
                throw_mismatch(message, theirs);
            }
            mailbox.remove(board, *other);
            other->state.store(State::taken);
        } else if (message.pending != nullptr) {
            mailbox.append(board, *message.pending);
        }
        unlock(mailbox);
        return other;
    }

    void deliver(Message const& message, PendingMessage& other) noexcept {
        if (message.is_send) {
            copy(data_of(other), message.buffer.data, message.buffer.bytes());
        } else {
            copy(message.buffer.data, data_of(other), message.buffer.bytes());
        }
        other.state.store(State::done); // from here on it may be gone
    }

    /// Whether the message is delivered: if not, the other side finds it no longer. Or its process has
    /// been stopped while it was at it: then the message is left to it for ever.
    [[nodiscard]] bool is_delivered(Message& message) {
        PendingMessage& pending = *message.pending;
        Mailbox& mailbox = mailbox_of(message);
        for (;;) {
            bool is_locked = false;
            auto const is_over = [&] {
                State const state = pending.state.load();
                return state == State::done ||
                       (state == State::waiting && (is_locked = mailbox.try_lock())) ||
                       group_.board().is_dead(message.peer); // a message to it is taken back, too
            };
            // A thread never stops for long; should it be late, it still copies to this rank's buffer.
            while (!this->wait(is_over, this->deadline())) {
                if (!Memory::is_all_in_reach) {
                    abort_for_copy(message);
                    message.pending = nullptr;
                    return false;
                }
            }
            if (!is_locked) {
                return pending.state.load() == State::done;
            }
            bool const waits = pending.state.load() == State::waiting;
            if (waits) {
                mailbox.remove(group_.board(), pending);
            }
            unlock(mailbox);
            if (waits) {
                return false;
            }
        }
    }
    void abort_for_copy(Message const& message) {
        group_.abort(
            reason_of_delay(
                {message.peer},
                "finish its copy",
                this->deadline(),
                this->rank(),
                "waits in " + message.text()
            ),
            this->rank()
        );
    }

    /// Whether the other side finds the buffer itself: then there is no copy of it.
    [[nodiscard]] bool is_in_reach(ConstBuffer buffer) const noexcept {
        return storage_->memory().reaches(buffer);
    }
    [[nodiscard]] std::size_t bytes_of(Message const& message) const noexcept {
        return sizeof(PendingMessage) + (is_in_reach(message.buffer) ? 0 : message.buffer.bytes());
    }
    [[nodiscard]] PendingMessage& write_message(Message const& message) {
        std::byte* const memory = storage_->memory().allocate(bytes_of(message));
        if (memory == nullptr) {
            throw ContractViolation{concat(
                message.text(),
                " finds no place in the memory that a rank shares: wait for what is under way, or "
                "cut it into smaller ones"
            )};
        }
        void* data = message.buffer.data;
        if (!is_in_reach(message.buffer)) {
            data = memory + sizeof(PendingMessage);
            if (message.is_send) {
                copy(data, message.buffer.data, message.buffer.bytes());
            }
        }
        return detail::write_message(
            memory, message.is_send, message.tag, message.buffer, group_.board().place_of(data)
        );
    }
    void throw_away(Message& message) noexcept {
        if (message.pending != nullptr) {
            auto* const memory = reinterpret_cast<std::byte*>(message.pending);
            storage_->memory().free(memory, bytes_of(message));
            message.pending = nullptr;
        }
    }

    [[noreturn]] void throw_mismatch(Message const& mine, Message const& theirs) {
        AbortReason const reason{
            FailureKind::mismatch,
            {this->rank(), mine.peer},
            concat(
                "messages between rank ",
                this->rank(),
                " and rank ",
                mine.peer,
                ": ",
                mine.text(),
                " meets ",
                theirs.text()
            )
        };
        group_.abort(reason, this->rank());
        throw_failure(group_.loss(mine.peer)); // which may be another one
    }

    Group group_;
    std::shared_ptr<GroupStorage<Memory>> storage_;
    std::array<std::vector<bool>, 2>
        mailboxes_; ///< for which there is memory: from, to another rank
};

}}} // namespace joinable::v0::detail
