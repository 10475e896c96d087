// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <joinable/communicator/detail/deadline.hpp>
#include <joinable/communicator/detail/work_of.hpp>
#include <joinable/communicator/shared_memory/engine/endpoint.hpp>
#include <joinable/communicator/shared_memory/engine/lent_memory.hpp>
#include <joinable/communicator/shared_memory/group/group.hpp>
#include <joinable/communicator/shared_memory/group/group_storage.hpp>
#include <joinable/communicator/shared_memory/group/mailbox.hpp>
#include <joinable/config.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// One side's view of its message.
struct Message {
    bool is_send = false;
    int peer = -1; ///< the rank of the other side
    int tag = 0;
    Buffer buffer = {};
    PendingMessage* pending = nullptr; ///< while it waits; null: delivered
    WaitClock polled = {};
    bool is_taken = false; ///< a test has seen that the other side copies it
    bool is_lost = false;

    [[nodiscard]] std::string text() const {
        return text_of_message(is_send, tag, buffer.count, buffer.dtype);
    }
};

/// The common part of a rank's communicator and works.
///
/// The second rank to arrive copies the message, so no background progress is needed and a busy
/// rank delays nobody. If ranks cannot reach each other's buffers, the first one leaves a copy, or
/// room for one, in memory that both reach.
template <class Memory>
class GroupRank : public HasWorks, public Endpoint<Group, LentBy<Memory>> {
    using Base = Endpoint<Group, LentBy<Memory>>;

public:
    GroupRank(Group group, int rank, std::shared_ptr<GroupStorage<Memory>> storage);

    [[nodiscard]] Group const& group() const noexcept { return group_; }
    [[nodiscard]] std::shared_ptr<GroupStorage<Memory>> const& storage() const noexcept {
        return storage_;
    }
    /// Whether other ranks can reach the buffer itself. A message is not copied then.
    [[nodiscard]] bool is_in_reach(ConstBuffer buffer) const noexcept {
        return storage_->memory().reaches(buffer);
    }

    // These and keep_alive() throw in a process that the rank has forked: asking may complete
    // another rank's abort.
    void abort(AbortReason const& reason) { group_here().abort(reason, this->rank()); }
    [[nodiscard]] bool is_aborted() const { return group_here().is_aborted(this->rank()); }
    [[nodiscard]] std::optional<AbortReason> abort_reason() const {
        return group_here().abort_reason(this->rank());
    }
    [[nodiscard]] bool is_renumbered() const noexcept { return group_.board().is_renumbered(); }
    void keep_alive() {
        this->require_here(this->rank());
        Base::keep_alive();
    }

    /// Makes a group of these ranks of this group, in their order; this rank is the first. Returns
    /// its offset from this board, or 0 if there is no memory.
    /// @throws PeerFailed, ...  this group was aborted.
    [[nodiscard]] std::uint64_t make_group(std::vector<int> members);

    /// Leaves a message for the other side, or delivers it at once.
    /// @throws Mismatch           the other side has another count or dtype; on both, unless the
    ///                            group has failed before.
    /// @throws ContractViolation  the memory for this rank's messages is full.
    [[nodiscard]] Message post_message(bool is_send, int peer, int tag, Buffer buffer);

    /// Blocks until the message is delivered, or never will be. After that no rank accesses its
    /// buffer, except as ProcessWork says.
    void finish(Message& message);
    [[nodiscard]] bool test(Message& message);
    [[nodiscard]] bool progress(Message& message);
    [[nodiscard]] static bool is_done(Message const& one) noexcept {
        return one.pending == nullptr;
    }
    [[nodiscard]] static char const* kind_of(Message const&) noexcept { return "a message"; }
    using Base::finish, Base::is_done, Base::progress, Base::test, HasWorks::kind_of;

private:
    using State = PendingMessage::State;

    /// @throws ContractViolation  this is a process that the rank has forked.
    [[nodiscard]] Group const& group_here() const {
        this->require_here(this->rank());
        return group_;
    }

    /// Whether waiting for the message would return at once, or throw.
    [[nodiscard]] bool is_over(Message const& message) const noexcept;
    /// @pre the message was not delivered
    [[noreturn]] void throw_loss(Message const& message) const {
        throw_failure(in_words_of(this->rank(), message.text(), group_.loss(message.peer)));
    }

    [[nodiscard]] static bool waits(Message const& message) noexcept {
        return message.pending->state.load() == State::waiting;
    }
    [[nodiscard]] static std::vector<int> missing_in(Message const& message) {
        return waits(message) ? std::vector{message.peer} : std::vector<int>{};
    }
    [[nodiscard]] static char const* what_is_missing(Message const& message) noexcept {
        return message.is_send ? "receive" : "send";
    }

    /// @throws CommunicationError  there is no memory for it; only the first message may need some.
    [[nodiscard]] Mailbox& mailbox_of(Message const& message);
    [[nodiscard]] std::byte* data_of(PendingMessage const& pending) noexcept {
        return group_.board().place_at(pending.data);
    }
    static void copy(void* to, void const* from, std::size_t bytes) noexcept {
        if (bytes != 0) {
            std::memmove(to, from, bytes); // a rank may send to itself
        }
    }

    /// Waits until this rank has locked the mailbox, or never will. Returns whether it has.
    [[nodiscard]] bool lock(Mailbox& mailbox, int peer);

    void unlock(Mailbox& mailbox) noexcept {
        mailbox.unlock();
        group_.board().room.wake(); // a rank may wait for it, whatever happens to this message
    }

    /// Takes the other side's message, if there is one. Otherwise leaves this side's, if it has
    /// been written.
    [[nodiscard]] PendingMessage* meet(Message& message);

    void deliver(Message const& message, PendingMessage& other) noexcept;

    /// Whether the message was delivered. If not, the other side can no longer find it, or the
    /// other process was stopped while it copied the message and keeps it.
    [[nodiscard]] bool is_delivered(Message& message);
    /// The other process was stopped while it copied the message, and keeps it.
    void give_up_on_copy(Message& message);

    [[nodiscard]] std::size_t bytes_of(Message const& message) const noexcept {
        return sizeof(PendingMessage) + (is_in_reach(message.buffer) ? 0 : message.buffer.bytes());
    }
    [[nodiscard]] PendingMessage& write_message(Message const& message);
    void throw_away(Message& message) noexcept;

    [[noreturn]] void throw_mismatch(Message const& mine, Message const& theirs);

    Group group_;
    std::shared_ptr<GroupStorage<Memory>> storage_;
    std::array<std::vector<bool>, 2> mailboxes_; ///< that have memory: from this rank, to it
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/shared_memory/group/impl/group_rank.ipp>
#endif
