// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/shared_memory/group/group.hpp>

#include <algorithm>

#include <joinable/detail/failure.hpp>
#include <joinable/detail/text.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION std::array<BlockPart, 2> Group::parts_at_start(int size) {
    return {{
        {0, Board::bytes_at_start(size)},
        {shared_at(size), mailboxes_at(size) - shared_at(size)},
    }};
}

JOINABLE_DEFINITION Group
Group::create(std::span<int const> numbers, std::span<std::byte> memory) { // zeros: no messages
    int const size = static_cast<int>(numbers.size());
    Group const group{Board::create(size, memory)};
    ::new (group.at(shared_at(size))) Shared{};
    auto* const members = ::new (group.at(members_at(size))) Member[width(size)];
    for (std::size_t rank = 0; rank < numbers.size(); ++rank) {
        members[rank].number = numbers[rank];
    }
    group.shared().present.store(size);
    return group;
}

JOINABLE_DEFINITION Mailbox& Group::mailbox(int from, int to) const noexcept {
    auto* const first = std::launder(reinterpret_cast<Mailbox*>(at(mailboxes_at(size()))));
    return first[width(from) * width(size()) + width(to)];
}

JOINABLE_DEFINITION void Group::leave(int rank) const {
    member(rank).has_left.store(true);
    board_->abort(loss(rank), number_of(rank), [this] { return look_for_deaths(); });
    shared().present.fetch_sub(1);
}

JOINABLE_DEFINITION bool Group::is_aborted(int rank) const {
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

JOINABLE_DEFINITION std::optional<std::vector<int>>
Group::ranks_here(AbortReason const& told, int number) const {
    auto const is_of = [&](auto const& end) {
        AbortReason const reason = end.reason();
        return reason.origin < 0 && is_same_failure(reason, told);
    };
    if ((shared().end.is_given() && is_of(shared().end)) ||
        (board_->is_aborted() && is_of(*board_))) {
        return told.ranks;
    }
    std::optional<std::vector<int>> found;
    for_each_child([&](Group child) {
        if (!found && child.rank_of(number) >= 0) {
            found = child.ranks_here(told, number);
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

JOINABLE_DEFINITION bool Group::adopt(Group child) const noexcept {
    shared().has_split.store(true);
    child.shared().parent = child.board_->place_of(board_);
    add(child);
    return !shared().end.is_given(); // if not ended, a later end finds the child
}

JOINABLE_DEFINITION bool Group::retire(int number) const noexcept {
    if (shared().present.load() != 0 || shared().parent == 0 || shared().children.load() != 0) {
        return false;
    }
    Group const parent = group_at(shared().parent); // lives as long as it has children
    int nobody = 0;
    if (!parent.shared().locked_by.compare_exchange_strong(nobody, number + 1)) {
        return false; // try again later
    }
    parent.remove(*this);
    bool const is_free = parent.shared().visitors.load() == 0;
    if (!is_free) { // another rank may still use it: try again later
        parent.add(*this);
    }
    parent.shared().locked_by.store(0);
    return is_free;
}

JOINABLE_DEFINITION int Group::rank_of(int number) const noexcept {
    int rank = size() - 1;
    while (rank >= 0 && number_of(rank) != number) {
        --rank;
    }
    return rank;
}

JOINABLE_DEFINITION std::optional<AbortReason> Group::ended_by() const {
    Group group = *this;
    while (!group.shared().end.is_given()) {
        if (group.shared().parent == 0) {
            return std::nullopt;
        }
        group = group.group_at(group.shared().parent);
    }
    return group.shared().end.reason();
}

JOINABLE_DEFINITION void Group::end(AbortReason const& reason, int writer) const {
    auto const before_sleep = [this] { return look_for_deaths(); };
    shared().end.give(reason, writer, [] {});
    shared().end.await_given(board_->room, reason, writer, [] {}, before_sleep);
    AbortReason const first = shared().end.reason();
    board_->abort(first, writer, before_sleep);
    for_each_child([&](Group child) { child.end(first, writer); });
}

JOINABLE_DEFINITION bool Group::mark_dead(
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
        return false; // another rank is doing it, or has died meanwhile
    }
    AbortReason const first = shared().end.reason();
    is_of_death = is_of_death && first.origin < 0 && is_same_failure(first, reason);
    board_->mark_dead(rank, number, first, burier);
    int holder = number + 1;
    shared().locked_by.compare_exchange_strong(holder, 0);
    bool is_everywhere = true;
    for_each_child([&](Group child) {
        is_everywhere = child.mark_dead(number, death, first, is_of_death, burier) && is_everywhere;
    });
    return is_everywhere;
}

JOINABLE_DEFINITION void Group::add(Group child) const noexcept {
    std::uint64_t const place = board_->place_of(child.board_);
    std::uint64_t first = shared().children.load();
    do {
        child.shared().next.store(first);
    } while (!shared().children.compare_exchange_weak(first, place));
}

JOINABLE_DEFINITION void Group::remove(Group child) const noexcept {
    std::uint64_t const place = board_->place_of(child.board_);
    std::uint64_t const next = child.shared().next.load();
    std::uint64_t newer = place;
    if (shared().children.compare_exchange_strong(newer, next)) {
        return;
    }
    while (group_at(newer).shared().next.load() != place) { // older ones do not move
        newer = group_at(newer).shared().next.load();
    }
    group_at(newer).shared().next.store(next);
}

JOINABLE_DEFINITION std::vector<int> all_numbers(int world_size) {
    std::vector<int> numbers;
    numbers.reserve(static_cast<std::size_t>(Board::checked(world_size)));
    for (int rank = 0; rank < world_size; ++rank) {
        numbers.push_back(rank);
    }
    return numbers;
}

JOINABLE_DEFINITION AbortReason reason_of_exit(Group group, int rank, AbortReason reason) {
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
