// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <joinable/communicator/detail/deadline.hpp>
#include <joinable/communicator/shared_memory/engine/endpoint.hpp>
#include <joinable/communicator/shared_memory/engine/lent_memory.hpp>
#include <joinable/communicator/shared_memory/group/group.hpp>
#include <joinable/communicator/shared_memory/group/group_storage.hpp>
#include <joinable/communicator/shared_memory/group/mailbox.hpp>
#include <joinable/config.hpp>

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
    GroupRank(Group group, int rank, std::shared_ptr<GroupStorage<Memory>> storage);

    [[nodiscard]] Group const& group() const noexcept { return group_; }
    [[nodiscard]] std::shared_ptr<GroupStorage<Memory>> const& storage() const noexcept {
        return storage_;
    }

    /// Tells the others that an exception is leaving `what` on this rank.
    void abort_for_exception(std::string const& what);

    /// The group of these ranks of this group, in their order, of which this is the first; as its
    /// place relative to this board. 0: there is no memory.
    /// @throws PeerFailed, ...  this group was aborted.
    [[nodiscard]] std::uint64_t make_group(std::vector<int> members);

    /// Leaves a message for the other side, or delivers at once.
    /// @throws Mismatch           the other side has another count or dtype; on both, unless the group
    ///                            had failed before.
    /// @throws ContractViolation  the memory for this rank's messages is in use.
    [[nodiscard]] Message post_message(bool is_send, int peer, int tag, Buffer buffer);

    /// Whether waiting for the message would return at once, or throw.
    [[nodiscard]] bool is_settled(Message const& message) const noexcept;

    /// Blocks until the message is settled; then nobody touches its buffer any more. Whether it was
    /// delivered: if not, group().loss(peer) says why.
    [[nodiscard]] bool finish_message(Message& message);

    /// Whether a message that was found not to be settled has been polled for the deadline: then the
    /// group is aborted.
    [[nodiscard]] bool has_polled_message_too_long(Message& message);

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
    [[nodiscard]] Mailbox& mailbox_of(Message const& message);
    [[nodiscard]] std::byte* data_of(PendingMessage const& pending) noexcept {
        return group_.board().place_at(pending.data);
    }
    static void copy(void* to, void const* from, std::size_t bytes) noexcept {
        if (bytes != 0) {
            std::memmove(to, from, bytes); // a rank may send to itself
        }
    }

    /// Waits until the mailbox is this rank's, or nothing can come of it. Whether it is this rank's.
    [[nodiscard]] bool lock(Mailbox& mailbox, int peer);

    void unlock(Mailbox& mailbox) noexcept {
        mailbox.unlock();
        group_.board().room.wake(); // a rank that waits for it, whatever becomes of this message
    }

    /// Takes the message of the other side, if there is one, else leaves this side's, if it is written.
    [[nodiscard]] PendingMessage* meet(Message& message);

    void deliver(Message const& message, PendingMessage& other) noexcept;

    /// Whether the message is delivered. If not, the other side no longer finds it, or the other process
    /// was stopped while it copied the message, which then stays with it.
    [[nodiscard]] bool is_delivered(Message& message);
    void abort_for_copy(Message const& message);

    /// Whether the other side finds the buffer itself: then there is no copy of it.
    [[nodiscard]] bool is_in_reach(ConstBuffer buffer) const noexcept {
        return storage_->memory().reaches(buffer);
    }
    [[nodiscard]] std::size_t bytes_of(Message const& message) const noexcept {
        return sizeof(PendingMessage) + (is_in_reach(message.buffer) ? 0 : message.buffer.bytes());
    }
    [[nodiscard]] PendingMessage& write_message(Message const& message);
    void throw_away(Message& message) noexcept;

    [[noreturn]] void throw_mismatch(Message const& mine, Message const& theirs);

    Group group_;
    std::shared_ptr<GroupStorage<Memory>> storage_;
    std::array<std::vector<bool>, 2>
        mailboxes_; ///< for which there is memory: from, to another rank
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/shared_memory/group/group_rank.ipp>
#endif
