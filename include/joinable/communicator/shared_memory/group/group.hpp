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
#include <utility>
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

/// Who looks for ranks that have died, where no other process does, and has memory for them.
class Watch {
public:
    Watch() = default;
    Watch(Watch const&) = delete;
    Watch& operator=(Watch const&) = delete;
    /// Called where it may take some microseconds. For how long it need not be called again.
    virtual std::chrono::nanoseconds look_for_deaths() noexcept = 0;
    /// Called before memory that the ranks share is used for the first time.
    /// @throws CommunicationError  there is none for it; the group is aborted.
    virtual void reserve(std::byte const*, std::size_t) {}

protected:
    ~Watch() = default;
};

/// What the ranks of one group share: the board for collectives, a mailbox for each pair of ranks,
/// and the groups that were split from it. All of it is one block of memory without addresses; this
/// is how one rank sees it, and costs two pointers.
///
/// Ranks have numbers among all, which stay the same in every group: those that they have in the
/// group from which all others come. By them writers of a FirstReason and holders of a lock are known.
class Group {
public:
    [[nodiscard]] static std::size_t bytes_for(int size) {
        return mailboxes_at(size) + width(size) * width(size) * sizeof(Mailbox);
    }
    /// The parts of that which are used from the start, each as its place and its bytes. The others are
    /// for reserve().
    [[nodiscard]] static std::array<std::pair<std::size_t, std::size_t>, 2> parts_at_start(int size
    );
    /// `numbers` are those of the members among all, by their rank in the group. `is_zeroed`: of the
    /// memory nothing is touched but these parts.
    /// @pre `memory` is as for a Board, and has bytes_for(size)
    static Group
    create(std::span<int const> numbers, std::span<std::byte> memory, bool is_zeroed = false);
    /// The group behind a board that create() has made.
    explicit Group(Board& board, Watch* watch = nullptr) noexcept : board_{&board}, watch_{watch} {}

    [[nodiscard]] Board& board() const noexcept { return *board_; }
    [[nodiscard]] int number_of(int rank) const noexcept { return member(rank).number; }
    [[nodiscard]] Mailbox& mailbox(int from, int to) const noexcept;

    /// `rank` ends the collectives, the messages, and the groups that were split from this one. The
    /// first writer wins: of a group around this one, too, whose end may not have reached this one
    /// when a rank that has heard of it fails here. Returns when nothing can start any more in any of
    /// them.
    void abort(AbortReason const& reason, int rank) const {
        end(ended_by().value_or(reason), number_of(rank));
    }

    /// `rank` takes part no longer: a collective cannot complete any more, but the others still have
    /// their messages and their groups without it. The last that is done with this group: its memory
    /// may be destroyed after that.
    void leave(int rank) const;

    /// The rank that has this number among all has died, wherever it was; `death` says how. Ends what
    /// abort() ends: in groups of which it was a member with its rank there, unless it, or another
    /// one, was about to end them for another reason. False if another process does it, or keeps
    /// other groups locked, and may have died as well: then call it again soon. `burier` is as a
    /// Board says. @pre this is the group from which all others come.
    bool mark_dead(int number, std::string const& death, int burier) const {
        return mark_dead(number, death, {FailureKind::peer_failed, {}, death}, true, burier);
    }
    /// Before a slot, a table of counts or a mailbox is used for the first time, by a rank that writes
    /// to it. @throws CommunicationError  there is no memory for it; the group of all is aborted.
    void reserve(void const* data, std::size_t bytes) const {
        if (watch_ != nullptr) {
            watch_->reserve(static_cast<std::byte const*>(data), bytes);
        }
    }
    /// Endpoint calls it.
    std::chrono::nanoseconds look_for_deaths() const noexcept {
        return watch_ == nullptr ? SleepThrough{}() : watch_->look_for_deaths();
    }
    /// Another group in the same memory, by its place relative to this board.
    [[nodiscard]] Group group_at(std::uint64_t place) const noexcept {
        return Group{Board::at_address(board_->place_at(place)), watch_};
    }

    /// Whether its collectives or its messages have ended, for `rank`. Does what another rank has only
    /// begun: so it is true for one that has failed because of that, and nothing can start after it was
    /// true.
    [[nodiscard]] bool is_aborted(int rank) const;

    /// Whether a message to or from `peer` that waits will never be delivered.
    [[nodiscard]] bool is_lost(int peer) const noexcept {
        return shared().end.is_given() || member(peer).has_left.load();
    }
    /// Why. A rank that leaves because of what has ended a group around this one says that.
    /// @pre is_lost(peer), or `peer` is the rank that leaves
    [[nodiscard]] AbortReason loss(int peer) const {
        return ended_by().value_or(reason_of_leaving(peer));
    }

    /// The ranks that `said` names, as this group numbers them, if it is what ended this group, or its
    /// collectives, or those of one split from it, of which the rank with this number was a member.
    /// Nothing, if it is not.
    [[nodiscard]] std::optional<std::vector<int>>
    ranks_here(AbortReason const& said, int number) const;

    /// Whether groups have been split from this one, whose errors name other numbers.
    [[nodiscard]] bool has_split() const noexcept { return shared().has_split.load(); }

    /// From now on `child` ends with this group. False if this has ended: then it is too late.
    [[nodiscard]] bool adopt(Group child) const noexcept;
    /// Whether the memory of a group that was adopted may be given back: all members have left, and
    /// so have those of its own groups. Then nobody finds it any more. `number` is that of the rank
    /// that does it, the one that has that memory.
    [[nodiscard]] bool retire(int number) const noexcept;

private:
    struct alignas(cache_line) Shared {
        FirstReason end; ///< of messages and of groups split from it; the board has its own
        std::atomic<int> present{0};
        std::atomic<bool> has_split{false};
        // The groups split from it, as places of boards relative to this one's. A rank that reads
        // the list or adds to it waits for nobody, and a rank that is killed or stopped within it
        // leaves it whole.
        std::atomic<int> locked_by{0}; ///< who removes a group; its number + 1, 0 is nobody
        std::atomic<int> visitors{0};  ///< who read it: meanwhile no memory in it is given back
        std::atomic<std::uint64_t> children{0}; ///< the newest one; 0 is none
        std::atomic<std::uint64_t> next{0};     ///< relative to the parent's: the one before it
        std::uint64_t parent = 0;               ///< 0 is none
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

    /// What has ended this group or one around it. Groups are ended from the outermost one
    /// inwards, and a rank that hears of it may be faster.
    [[nodiscard]] std::optional<AbortReason> ended_by() const;

    void end(AbortReason const& reason, int writer) const;

    /// `reason` is that of the group around this one: of this death, or of what was before it.
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
    Watch* watch_ = nullptr; ///< null: others look
};

/// The numbers of the members of the group from which all others come: their ranks.
[[nodiscard]] std::vector<int> all_numbers(int world_size);

/// What the other ranks hear when a failure ends the body of `rank`. An error that names ranks may
/// mean those of a group that was split off: it is told in the numbers of all. Where it is not known
/// which group that was, it is this rank that failed.
[[nodiscard]] AbortReason reason_of_exit(Group group, int rank, AbortReason reason);

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/shared_memory/group/group.ipp>
#endif
