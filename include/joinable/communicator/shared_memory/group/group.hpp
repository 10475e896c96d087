// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
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
#include <joinable/detail/failure.hpp>
#include <joinable/detail/text.hpp>
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
    ) {
        return {{
            {0, Board::bytes_at_start(size)},
            {shared_at(size), mailboxes_at(size) - shared_at(size)},
        }};
    }
    /// `numbers` are those of the members among all, by their rank in the group. `is_zeroed`: of the
    /// memory nothing is touched but these parts.
    /// @pre `memory` is as for a Board, and has bytes_for(size)
    static Group
    create(std::span<int const> numbers, std::span<std::byte> memory, bool is_zeroed = false) {
        int const size = static_cast<int>(numbers.size());
        Group const group{Board::create(size, memory)};
        ::new (group.at(shared_at(size))) Shared{};
        auto* const members = ::new (group.at(members_at(size))) Member[width(size)];
        for (std::size_t rank = 0; rank < numbers.size(); ++rank) {
            members[rank].number = numbers[rank];
        }
        group.shared().present.store(size);
        if (!is_zeroed) { // which empty mailboxes are
            ::new (group.at(mailboxes_at(size))) Mailbox[width(size) * width(size)];
        }
        return group;
    }
    /// The group behind a board that create() has made.
    explicit Group(Board& board, Watch* watch = nullptr) noexcept : board_{&board}, watch_{watch} {}

    [[nodiscard]] Board& board() const noexcept { return *board_; }
    [[nodiscard]] int number_of(int rank) const noexcept { return member(rank).number; }
    [[nodiscard]] Mailbox& mailbox(int from, int to) const noexcept {
        auto* const first = std::launder(reinterpret_cast<Mailbox*>(at(mailboxes_at(size()))));
        return first[width(from) * width(size()) + width(to)];
    }

    /// `rank` ends the collectives, the messages, and the groups that were split from this one. The
    /// first writer wins: of a group around this one, too, whose end may not have reached this one
    /// when a rank that has heard of it fails here. Returns when nothing can start any more in any of
    /// them.
    void abort(AbortReason const& reason, int rank) const {
        end(ended_by().value_or(reason), number_of(rank));
    }

    /// `rank` takes part no longer: a collective cannot complete any more, but the others still have
    /// their messages and their groups without it. The last that is done with this group: its memory
    /// may be gone after that.
    void leave(int rank) const {
        member(rank).has_left.store(true);
        board_->abort(loss(rank), number_of(rank), [this] { return look_for_deaths(); });
        shared().present.fetch_sub(1);
    }

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
    [[nodiscard]] bool is_aborted(int rank) const {
        bool const is_of_all = shared().end.has_begun();
        if (!is_of_all && !board_->is_ending()) {
            return false;
        }
        if (board_->is_aborted() && (!is_of_all || shared().end.is_given())) {
            return true;
        }
        int const culprit = rank_of(is_of_all ? shared().end.writer() : board_->ended_by());
        AbortReason reason{
            FailureKind::communication, {}, "a process that was to tell why all ends was stopped"
        };
        if (culprit >= 0) {
            reason = reason_of_delay(
                {culprit}, "finish its abort", FirstReason::patience, rank, "waits for it"
            );
        }
        if (is_of_all) {
            end(reason, number_of(rank));
        } else {
            board_->abort(reason, number_of(rank), [this] { return look_for_deaths(); });
        }
        return true;
    }

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
    ranks_here(AbortReason const& said, int number) const {
        auto const is_of = [&](auto const& end) { return end.reason().message == said.message; };
        if ((shared().end.is_given() && is_of(shared().end)) ||
            (board_->is_aborted() && is_of(*board_))) {
            return said.ranks;
        }
        std::optional<std::vector<int>> found;
        for_each_child([&](Group child) {
            if (!found && child.rank_of(number) >= 0) {
                found = child.ranks_here(said, number);
                if (found) {
                    std::erase_if(*found, [&](int rank) { return rank >= child.size(); });
                    std::transform(found->begin(), found->end(), found->begin(), [&](int rank) {
                        return rank_of(child.number_of(rank));
                    });
                    std::sort(found->begin(), found->end());
                }
            }
        });
        return found;
    }

    /// Whether groups have been split from this one, whose errors name other numbers.
    [[nodiscard]] bool has_split() const noexcept { return shared().has_split.load(); }

    /// From now on `child` ends with this group. False if this has ended: then it is too late.
    [[nodiscard]] bool adopt(Group child) const noexcept {
        shared().has_split.store(true);
        child.shared().parent = child.board_->place_of(board_);
        add(child);
        return !shared().end.is_given(); // or the rank that ends it finds the child after this
    }
    /// Whether the memory of a group that was adopted may be given back: all members have left, and
    /// so have those of its own groups. Then nobody finds it any more. `number` is that of the rank
    /// that does it, the one that has that memory.
    [[nodiscard]] bool retire(int number) const noexcept {
        if (shared().present.load() != 0 || shared().parent == 0 || shared().children.load() != 0) {
            return false;
        }
        Group const parent = group_at(shared().parent); // lives as long as it has children
        int nobody = 0;
        if (!parent.shared().locked_by.compare_exchange_strong(nobody, number + 1)) {
            return false; // the next time
        }
        parent.remove(*this);
        bool const is_free = parent.shared().visitors.load() == 0;
        if (!is_free) { // somebody may have found it before: the next time
            parent.add(*this);
        }
        parent.shared().locked_by.store(0);
        return is_free;
    }

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
    [[nodiscard]] int rank_of(int number) const noexcept {
        int rank = size() - 1;
        while (rank >= 0 && number_of(rank) != number) {
            --rank;
        }
        return rank;
    }

    /// What has ended this group or one around it. Groups are ended from the outermost one
    /// inwards, and a rank that hears of it may be faster.
    [[nodiscard]] std::optional<AbortReason> ended_by() const {
        Group group = *this;
        while (!group.shared().end.is_given()) {
            if (group.shared().parent == 0) {
                return std::nullopt;
            }
            group = group.group_at(group.shared().parent);
        }
        return group.shared().end.reason();
    }

    void end(AbortReason const& reason, int writer) const {
        auto const before_sleep = [this] { return look_for_deaths(); };
        shared().end.give(reason, writer, [] {});
        shared().end.settle(board_->room, reason, writer, [] {}, before_sleep);
        AbortReason const first = shared().end.reason();
        board_->abort(first, writer, before_sleep);
        for_each_child([&](Group child) { child.end(first, writer); });
    }

    /// `reason` is that of the group around this one: of this death, or of what was before it.
    bool mark_dead(
        int number, std::string const& death, AbortReason reason, bool is_of_death, int burier
    ) const {
        int const rank = rank_of(number);
        if (is_of_death && rank >= 0) {
            reason.ranks = {rank};
            reason.message = concat("rank ", rank, " failed: ", death);
        }
        if (shared().end.take_over(number, reason, burier, [] {})) {
            board_->room.wake();
        }
        if (!shared().end.is_given()) {
            return false; // another rank does it, or has died there as well
        }
        AbortReason const first = shared().end.reason();
        is_of_death = is_of_death && first.message == reason.message;
        board_->mark_dead(rank, number, first, burier);
        int holder = number + 1;
        shared().locked_by.compare_exchange_strong(holder, 0);
        bool is_everywhere = true;
        for_each_child([&](Group child) {
            is_everywhere =
                child.mark_dead(number, death, first, is_of_death, burier) && is_everywhere;
        });
        return is_everywhere;
    }

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
    void add(Group child) const noexcept {
        std::uint64_t const place = board_->place_of(child.board_);
        std::uint64_t first = shared().children.load();
        do {
            child.shared().next.store(first);
        } while (!shared().children.compare_exchange_weak(first, place));
    }
    /// @pre it is in the list, and this rank holds the lock
    void remove(Group child) const noexcept {
        std::uint64_t const place = board_->place_of(child.board_);
        std::uint64_t const next = child.shared().next.load();
        std::uint64_t newer = place;
        if (shared().children.compare_exchange_strong(newer, next)) {
            return;
        }
        while (group_at(newer).shared().next.load() != place
        ) { // those before it stay where they are
            newer = group_at(newer).shared().next.load();
        }
        group_at(newer).shared().next.store(next);
    }

    Board* board_;
    Watch* watch_ = nullptr; ///< null: others look
};

/// The numbers of the members of the group from which all others come: their ranks.
[[nodiscard]] inline std::vector<int> all_numbers(int world_size) {
    std::vector<int> numbers;
    numbers.reserve(static_cast<std::size_t>(Board::checked(world_size)));
    for (int rank = 0; rank < world_size; ++rank) {
        numbers.push_back(rank);
    }
    return numbers;
}

/// What the other ranks hear when a failure ends the body of `rank`. An error that names ranks may
/// mean those of a group that was split off: it is told in the numbers of all. Where it is not known
/// which group that was, it is this rank that failed.
[[nodiscard]] inline AbortReason reason_of_exit(Group group, int rank, AbortReason reason) {
    if (!reason.ranks.empty() && group.has_split()) {
        std::vector<int> const ranks = group.ranks_here(reason, rank).value_or(std::vector<int>{});
        if (!ranks.empty() && ranks != reason.ranks) {
            reason.message = concat(ranks_text(ranks), ", in a group split off: ", reason.message);
        }
        reason.ranks = ranks;
    }
    return blamed_on(rank, std::move(reason));
}

}}} // namespace joinable::v0::detail
