// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/shared_memory/group/group_rank.hpp>

#include <new>
#include <optional>
#include <utility>

#include <joinable/communicator/detail/reasons.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

template <class Memory>
GroupRank<Memory>::GroupRank(Group group, int rank, std::shared_ptr<GroupStorage<Memory>> storage)
    : Base{group, rank, LentBy<Memory>{std::shared_ptr<Memory>{storage, &storage->memory()}}},
      group_{group}, storage_{std::move(storage)} {}

template <class Memory>
std::uint64_t GroupRank<Memory>::make_group(std::vector<int> members) {
    bool const is_renumbered = renumbers(members);
    for (int& member : members) {
        member = group_.number_of(member);
    }
    std::optional<Group> made;
    try {
        made = storage_->make(members, members.front());
    } catch (std::bad_alloc const&) { // NOLINT(bugprone-empty-catch): all members get no group
    }
    if (!made) {
        return 0;
    }
    if (is_renumbered) {
        made->board().renumber();
    }
    if (!group_.adopt(*made)) {
        throw_failure(group_.loss(this->rank()));
    }
    return group_.board().place_of(&made->board());
}

template <class Memory>
Message GroupRank<Memory>::post_message(bool is_send, int peer, int tag, Buffer buffer) {
    Message message{is_send, peer, tag, buffer};
    PendingMessage* other = meet(message);
    if (other == nullptr) {
        message.pending = &write_message(message);
        other = meet(message); // it may have come meanwhile
    }
    if (other != nullptr) {
        deliver(message, *other);
        throw_away(message);
        group_.board().room.wake();
    }
    return message;
}

template <class Memory>
bool GroupRank<Memory>::is_over(Message const& message) const noexcept {
    switch (message.pending->state.load()) {
    case PendingMessage::State::waiting: return group_.is_lost(message.peer);
    case PendingMessage::State::taken: return group_.board().is_dead(message.peer);
    case PendingMessage::State::done: break;
    }
    return true;
}

template <class Memory>
void GroupRank<Memory>::finish(Message& message) {
    if (message.pending != nullptr) {
        if (!is_over(message)) {
            this->wait_for_others(
                [&] { return !waits(message) || group_.is_lost(message.peer); },
                [&] { return missing_in(message); },
                what_is_missing(message),
                [&] { return "waits in " + message.text(); }
            );
        }
        message.is_lost = !is_delivered(message);
        if (!message.is_lost && !message.is_send && !is_in_reach(message.buffer)) {
            copy(message.buffer.data, data_of(*message.pending), message.buffer.bytes());
        }
        throw_away(message);
    }
    if (message.is_lost) {
        throw_loss(message);
    }
}

template <class Memory>
bool GroupRank<Memory>::test(Message& message) {
    auto const has_polled_too_long = [&] {
        return this->has_polled_too_long(
            message.polled,
            [&] { return missing_in(message); },
            what_is_missing(message),
            [&] { return "waits in " + message.text(); }
        );
    };
    if (progress(message)) {
        return true;
    }
    if (Memory::is_all_in_reach || waits(message)) {
        return has_polled_too_long() && progress(message);
    }
    // The other process copies, or was stopped while it did.
    if (!std::exchange(message.is_taken, true)) {
        message.polled = {}; // not the time before it came
    }
    if (message.polled.reaches(this->deadline())) {
        give_up_on_copy(message);
        message.is_lost = true;
        throw_loss(message);
    }
    return false;
}

template <class Memory>
bool GroupRank<Memory>::progress(Message& message) {
    if (message.pending != nullptr && !is_over(message)) {
        this->advance_others();
        group_.look_for_deaths(); // a rank that polls may never wait
        return false;
    }
    finish(message);
    return true;
}

template <class Memory>
Mailbox& GroupRank<Memory>::mailbox_of(Message const& message) {
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

template <class Memory>
bool GroupRank<Memory>::lock(Mailbox& mailbox, int peer) {
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

template <class Memory>
PendingMessage* GroupRank<Memory>::meet(Message& message) {
    Board& board = group_.board();
    Mailbox& mailbox = mailbox_of(message);
    if (!lock(mailbox, message.peer)) {
        throw_away(message);
        throw_loss(message);
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

template <class Memory>
void GroupRank<Memory>::deliver(Message const& message, PendingMessage& other) noexcept {
    if (message.is_send) {
        copy(data_of(other), message.buffer.data, message.buffer.bytes());
    } else {
        copy(message.buffer.data, data_of(other), message.buffer.bytes());
    }
    other.state.store(State::done); // the other rank may now destroy it
}

template <class Memory>
bool GroupRank<Memory>::is_delivered(Message& message) {
    PendingMessage& pending = *message.pending;
    Mailbox& mailbox = mailbox_of(message);
    for (;;) {
        bool is_locked = false;
        auto const is_over = [&] {
            State const state = pending.state.load();
            return state == State::done ||
                   (state == State::waiting && (is_locked = mailbox.try_lock())) ||
                   group_.board().is_dead(message.peer); // messages to it are withdrawn, too
        };
        // A thread never stops for long, and even a late one still copies to this rank's buffer.
        while (!this->wait(is_over, this->deadline())) {
            if (!Memory::is_all_in_reach) {
                give_up_on_copy(message);
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

template <class Memory>
void GroupRank<Memory>::give_up_on_copy(Message& message) {
    group_.board().set_overdue(message.peer);
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
    if (!message.is_send) {
        storage_->memory().keep_arena(message.buffer.data);
    }
    message.pending = nullptr;
}

template <class Memory>
PendingMessage& GroupRank<Memory>::write_message(Message const& message) {
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

template <class Memory>
void GroupRank<Memory>::throw_away(Message& message) noexcept {
    if (message.pending != nullptr) {
        auto* const memory = reinterpret_cast<std::byte*>(message.pending);
        storage_->memory().free(memory, bytes_of(message));
        message.pending = nullptr;
    }
}

template <class Memory>
void GroupRank<Memory>::throw_mismatch(Message const& mine, Message const& theirs) {
    group_.abort(
        reason_of_messages(this->rank(), mine.peer, mine.text(), theirs.text()), this->rank()
    );
    throw_failure(group_.loss(mine.peer)); // the reason may be another one
}

}}} // namespace joinable::v0::detail
