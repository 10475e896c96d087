// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/shared_memory/board/board.hpp>

#include <algorithm>

#include <joinable/communicator/detail/ranks.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void ChunkProgress::reset() noexcept {
    claimed.store(0, std::memory_order_relaxed);
    done.store(0, std::memory_order_relaxed);
    lent.store(0, std::memory_order_relaxed);
    has_given_up.store(false, std::memory_order_relaxed);
}

JOINABLE_DEFINITION int Board::checked(int size) {
    if (size < 1 || size > max_ranks) {
        throw ContractViolation{
            concat("a group needs between 1 and ", max_ranks, " ranks, but was given ", size)
        };
    }
    return size;
}

JOINABLE_DEFINITION Board& Board::create(int size, std::span<std::byte> memory) {
    auto* const board = ::new (memory.data()) Board{size};
    ::new (board->at(lines_at())) ArrivalLine[arrivals(size)];
    ::new (board->at(ranks_at(size))) RankState[width(size)];
    ::new (board->at(progress_at(size))) ChunkProgress[arrivals(size)];
    // Slots and tables of counts are not touched before they are used.
    ::new (board->at(counts_at(size))) Count[counts_per_arrival(size) * arrivals(size)];
    return *board;
}

JOINABLE_DEFINITION std::byte* Board::place_at(std::uint64_t place) noexcept {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): it may lie outside of the board
    return reinterpret_cast<std::byte*>(
        reinterpret_cast<std::uintptr_t>(this) + static_cast<std::uintptr_t>(place)
    );
}

JOINABLE_DEFINITION ChunkProgress& Board::progress(int rank, std::uint64_t sequence) noexcept {
    return std::launder(reinterpret_cast<ChunkProgress*>(at(progress_at(size_)))
    )[arrival(rank, sequence)];
}

JOINABLE_DEFINITION bool Board::has_arrived(int rank, std::uint64_t sequence) noexcept {
    return (line(rank, sequence).word.load() & ArrivalLine::sequence_mask) ==
           (sequence & ArrivalLine::sequence_mask);
}

JOINABLE_DEFINITION std::vector<int> Board::missing(std::uint64_t sequence) {
    return ranks_where(size_, [&](int rank) { return !has_arrived(rank, sequence); });
}

JOINABLE_DEFINITION std::uint64_t Board::release(int rank) noexcept {
    RankState& state = state_of(rank);
    std::uint64_t const retired = state.retired.load();
    return (std::min)(retired, computes(state, Worker::helper).load());
}

JOINABLE_DEFINITION std::vector<int> Board::holding_up(std::uint64_t sequence) {
    return ranks_where(size_, [&](int rank) { return release(rank) + max_in_flight <= sequence; });
}

JOINABLE_DEFINITION void
Board::mark_dead(int rank, int number, AbortReason const& reason, int burier) noexcept {
    if (is_aborted() && (rank < 0 || is_dead(rank))) {
        return; // else the ranks that find it would wake each other endlessly
    }
    reason_.take_over(number, reason, burier, [this] { freeze(); });
    if (rank >= 0) { // after that: a rank that sees it asks for the reason
        has_lost_.store(true);
        state_of(rank).is_dead.store(true); // last: from here on others do not repeat this
    }
    room.wake();
}

JOINABLE_DEFINITION std::vector<int> Board::computing(std::uint64_t sequence) {
    return ranks_where(size_, [&](int rank) { return may_compute(state_of(rank), sequence); });
}

JOINABLE_DEFINITION bool Board::may_be_lost(std::uint64_t sequence) noexcept {
    bool is_left_undone = false;
    for (int rank = 0; has_lost_.load() && rank < size_; ++rank) {
        RankState const& state = state_of(rank);
        bool const has_claimed = may_compute(state, sequence);
        if (has_claimed && !state.is_dead.load() && !state.is_given_up.load()) {
            return false;
        }
        is_left_undone = is_left_undone || has_claimed;
    }
    return is_left_undone;
}

JOINABLE_DEFINITION bool
Board::may_compute(RankState const& state, std::uint64_t sequence) noexcept {
    return std::any_of(state.computes.begin(), state.computes.end(), [&](auto const& at) {
        return at.load() == sequence;
    });
}

JOINABLE_DEFINITION void Board::freeze() noexcept {
    for (std::size_t i = 0; i < arrivals(size_); ++i) {
        lines()[i].word.fetch_or(ArrivalLine::frozen);
    }
}

JOINABLE_DEFINITION std::span<Board::Count>
Board::counts_of(int rank, std::uint64_t sequence) noexcept {
    auto* const counts = std::launder(reinterpret_cast<Count*>(at(counts_at(size_))));
    std::size_t const n = counts_per_arrival(size_);
    return {counts + arrival(rank, sequence) * n, n};
}

}}} // namespace joinable::v0::detail
