// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <joinable/communicator/detail/reasons.hpp>
#include <joinable/communicator/shared_memory/board/board.hpp>
#include <joinable/communicator/shared_memory/board/first_reason.hpp>
#include <joinable/communicator/shared_memory/board/group_memory.hpp>
#include <joinable/communicator/shared_memory/board/waiting.hpp>
#include <joinable/communicator/shared_memory/group/mailbox.hpp>
#include <joinable/config.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Detects ranks that have died, where no other process does, and reserves memory for them.
class Watch {
public:
    Watch() = default;
    Watch(Watch const&) = delete;
    Watch& operator=(Watch const&) = delete;
    /// May take some microseconds. Returns how long it need not be called again.
    virtual std::chrono::nanoseconds look_for_deaths() noexcept = 0;
    /// Called before memory that the ranks share is used for the first time.
    /// @throws CommunicationError  there is no memory; the group is aborted.
    virtual void reserve(std::byte const*, std::size_t) {}

protected:
    ~Watch() = default;
};

/// The objects that the ranks of one group share: the board for collectives, a mailbox for each pair of ranks,
/// and the groups that were split from it. All of it is one block of memory without addresses. This
/// class is one rank's view of it, and costs two pointers.
///
/// A rank's number is its rank in the outermost group. It stays the same in every subgroup. Numbers
/// identify writers of a FirstReason and holders of a lock.
class Group {
public:
    [[nodiscard]] static std::size_t bytes_for(int size) {
        return mailboxes_at(size) + width(size) * width(size) * sizeof(Mailbox);
    }
    /// The parts of that memory that are used from the start. The others need reserve().
    [[nodiscard]] static std::array<BlockPart, 2> parts_at_start(int size);
    /// The part that create() needs zeroed.
    [[nodiscard]] static BlockPart zeros_at_start(int size) {
        return {mailboxes_at(size), bytes_for(size) - mailboxes_at(size)};
    }
    /// `numbers` are the members' numbers, by rank in this group. Touches only the parts that are
    /// used from the start.
    /// @pre `memory` is as for a Board, has bytes_for(size), and zeros in zeros_at_start(size)
    static Group create(std::span<int const> numbers, std::span<std::byte> memory);
    /// The group of a board that create() has made.
    explicit Group(Board& board, Watch* watch = nullptr) noexcept : board_{&board}, watch_{watch} {}

    [[nodiscard]] Board& board() const noexcept { return *board_; }
    [[nodiscard]] int number_of(int rank) const noexcept { return member(rank).number; }
    [[nodiscard]] Mailbox& mailbox(int from, int to) const noexcept;

    /// `rank` ends the collectives, the messages, and the groups that were split from this one. The
    /// first reason wins, across parent groups too: a parent may have been aborted before that
    /// abort has reached this group. Returns when nothing can start any more in any of these
    /// groups.
    void abort(AbortReason const& reason, int rank) const {
        end(ended_by().value_or(reason), number_of(rank));
    }

    /// `rank` leaves. Collectives can no longer complete, but the others still have their messages
    /// and their groups without it. This must be the rank's last use of the group, whose memory may
    /// be destroyed after that.
    void leave(int rank) const;

    /// Records that the rank with this number has died, in any group; `death` says how. Ends what
    /// abort() ends, in all groups of which it was a member, with its rank there. A group that this
    /// or another rank was already ending keeps its reason. Returns false if another process is
    /// doing this or holds the lock of other groups: it may have died as well, so call this again
    /// soon. `burier` is as for Board. @pre this is the outermost group
    bool mark_dead(int number, std::string const& death, int burier) const {
        return mark_dead(number, death, {FailureKind::peer_failed, {}, death}, true, burier);
    }
    /// Called by a rank before it first writes to a slot, a table of counts or a mailbox.
    /// @throws CommunicationError  there is no memory for it; the outermost group is aborted.
    void reserve(void const* data, std::size_t bytes) const {
        if (watch_ != nullptr) {
            watch_->reserve(static_cast<std::byte const*>(data), bytes);
        }
    }
    /// For Endpoint.
    std::chrono::nanoseconds look_for_deaths() const noexcept {
        return watch_ == nullptr ? SleepThrough{}() : watch_->look_for_deaths();
    }
    /// Another group in the same memory, by its offset from this board.
    [[nodiscard]] Group group_at(std::uint64_t place) const noexcept {
        return Group{Board::at_address(board_->place_at(place)), watch_};
    }

    /// Whether its collectives or its messages have ended, for `rank`. Completes an end that
    /// another rank has begun. It is therefore true on a rank that has failed because of that end,
    /// and nothing can start after it was true.
    [[nodiscard]] bool is_aborted(int rank) const;
    /// The reason that its collectives throw, if it is_aborted() for `rank`.
    [[nodiscard]] std::optional<AbortReason> abort_reason(int rank) const {
        return is_aborted(rank) ? std::optional{board_->reason()} : std::nullopt;
    }

    /// Whether a waiting message to or from `peer` will never be delivered.
    [[nodiscard]] bool is_lost(int peer) const noexcept {
        return shared().end.is_given() || member(peer).has_left.load();
    }
    /// The reason. A rank that leaves because a parent group has ended gives the parent's reason.
    /// @pre is_lost(peer), or `peer` is the rank that leaves
    [[nodiscard]] AbortReason loss(int peer) const {
        return board_->here(ended_by().value_or(reason_of_leaving(peer)));
    }

    /// The ranks that `told`, the reason of an exception, names, as numbered in this group. Requires
    /// that a reason of this kind and with these ranks ended this group, its collectives, or those of a subgroup of which the rank with this number was a
    /// member. Otherwise nothing.
    [[nodiscard]] std::optional<std::vector<int>>
    ranks_here(AbortReason const& told, int number) const;

    /// Whether groups have been split from this one; their errors use different numbers.
    [[nodiscard]] bool has_split() const noexcept { return shared().has_split.load(); }

    /// From now on `child` ends with this group. Returns false if this group has ended already.
    [[nodiscard]] bool adopt(Group child) const noexcept;
    /// Whether the memory of an adopted group may be freed: all members have left it and its
    /// subgroups. If so, no rank can find the group any more. The caller is the rank with `number`,
    /// whose memory the group uses.
    [[nodiscard]] bool retire(int number) const noexcept;

private:
    struct alignas(cache_line) Shared {
        FirstReason end; ///< of messages and subgroups; the board has its own
        std::atomic<int> present{0};
        std::atomic<bool> has_split{false};
        // The subgroups, as offsets of their boards from this one. A rank that reads the list or
        // adds to it does not wait, and a rank that is killed or stopped meanwhile leaves it
        // intact.
        std::atomic<int> locked_by{0}; ///< number + 1 of the rank that removes a group; 0: none
        std::atomic<int> visitors{0};  ///< readers; meanwhile no memory in it is freed
        std::atomic<std::uint64_t> children{0}; ///< the newest; 0: none
        std::atomic<std::uint64_t> next{0};     ///< the next older one, relative to the parent
        std::uint64_t parent = 0;               ///< 0: none
    };
    struct Member {
        int number = 0;
        std::atomic<bool> has_left{false};
    };
    static_assert(std::is_trivially_destructible_v<Shared>);

    static std::size_t width(int size) noexcept { return static_cast<std::size_t>(size); }
    static std::size_t shared_at(int size) { return in_cache_lines(Board::bytes_for(size)); }
    static std::size_t members_at(int size) { return shared_at(size) + sizeof(Shared); }
    static std::size_t mailboxes_at(int size) {
        return in_cache_lines(members_at(size) + width(size) * sizeof(Member));
    }

    [[nodiscard]] int size() const noexcept { return board_->size(); }
    [[nodiscard]] std::byte* at(std::size_t offset) const noexcept {
        return reinterpret_cast<std::byte*>(board_) + offset;
    }
    [[nodiscard]] Shared& shared() const noexcept {
        return *std::launder(reinterpret_cast<Shared*>(at(shared_at(size()))));
    }
    [[nodiscard]] Member& member(int rank) const noexcept {
        return std::launder(reinterpret_cast<Member*>(at(members_at(size()))))[rank];
    }
    [[nodiscard]] int rank_of(int number) const noexcept;

    /// The reason that has ended this group or a parent. Groups are ended from the outermost one
    /// inwards, so a rank may learn of it before this group has ended.
    [[nodiscard]] std::optional<AbortReason> ended_by() const;

    void end(AbortReason const& reason, int writer) const;

    /// `reason` is the parent group's: this death, or an earlier reason.
    bool mark_dead(
        int number, std::string const& death, AbortReason reason, bool is_of_death, int burier
    ) const;

    template <class Do>
    void for_each_child(Do const& visit) const {
        shared().visitors.fetch_add(1);
        for (std::uint64_t place = shared().children.load(); place != 0;) {
            Group const child = group_at(place);
            visit(child);
            place = child.shared().next.load();
        }
        shared().visitors.fetch_sub(1);
    }
    void add(Group child) const noexcept;
    /// @pre it is in the list, and this rank holds the lock
    void remove(Group child) const noexcept;

    Board* board_;
    Watch* watch_ = nullptr; ///< null: another process does it
};

/// The numbers of the members of the outermost group, which are their ranks.
[[nodiscard]] std::vector<int> all_numbers(int world_size);

/// The reason that the other ranks get when a failure ends the body of `rank`. An error may name
/// ranks of a subgroup; they are translated to ranks of the outermost group. If that subgroup is
/// unknown, this rank is named.
[[nodiscard]] AbortReason reason_of_exit(Group group, int rank, AbortReason reason);

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/shared_memory/group/impl/group.ipp>
#endif
