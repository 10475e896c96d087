// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/shared_memory/engine/slices.hpp>

#include <algorithm>

#include <joinable/communicator/detail/ranks.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION Slices::Slices(Board const& board, Descriptor const& signature) noexcept
    : total{signature.count}, element{size_of(signature.dtype)},
      chunk{chunk_bytes(board) / element}, ranks{board.size()} {}

JOINABLE_DEFINITION std::size_t Slices::count() const noexcept {
    std::size_t const slice = chunk * static_cast<std::size_t>(ranks);
    return (total + slice - 1) / slice;
}

JOINABLE_DEFINITION std::pair<std::size_t, std::size_t>
Slices::range(std::size_t slice, int from, int to) const noexcept {
    auto const start = [&](int rank) {
        std::size_t const chunks =
            slice * static_cast<std::size_t>(ranks) + static_cast<std::size_t>(rank);
        return (std::min)(total, chunks * chunk);
    };
    return {start(from), start(to)};
}

JOINABLE_DEFINITION std::size_t Slices::chunk_bytes(Board const& board) noexcept {
    constexpr std::size_t line = 64;
    std::size_t const slice =
        board.room.is_crowded() ? tuning::crowded_slice_bytes : tuning::slice_bytes;
    return (slice / static_cast<std::size_t>(board.size()) / line + 1) * line;
}

JOINABLE_DEFINITION bool Pipeline::is_needed(Board& board, std::uint64_t sequence) noexcept {
    return any_rank(board.size(), [&](int rank) {
        return board.line(rank, sequence).payload[ArrivalLine::ring] != 0;
    });
}

JOINABLE_DEFINITION std::vector<int> Pipeline::holding_up(Board& board, int own) const {
    std::uint64_t const done = done_by_all(board);
    std::uint64_t const lent = lent_by_all(board);
    return ranks_where(done == count_ ? 0 : board.size(), [&](int rank) {
        ChunkProgress const& its = board.progress(rank, sequence_);
        return rank != own && (done < lent ? its.done.load() == done : its.lent.load() == lent);
    });
}

JOINABLE_DEFINITION bool Pipeline::is_lost(Board& board, int own) const {
    if (!board.is_aborted()) {
        return false;
    }
    auto const has_died_before_its_end = [&](int rank) {
        ChunkProgress const& its = board.progress(rank, sequence_);
        return board.is_dead(rank) && (its.lent.load() != count_ || its.done.load() != count_);
    };
    if (any_rank(board.size(), has_died_before_its_end) || is_given_up(board)) {
        return true;
    }
    std::vector<int> const ranks = holding_up(board, own);
    return std::any_of(ranks.begin(), ranks.end(), [&](int rank) {
        return board.is_overdue(rank);
    });
}

JOINABLE_DEFINITION bool Pipeline::is_in_use(Board& board) const {
    std::vector<int> const ranks = board.computing(sequence_);
    return std::any_of(ranks.begin(), ranks.end(), [&](int rank) {
        return !board.is_dead(rank) && !board.is_overdue(rank);
    });
}

JOINABLE_DEFINITION bool Pipeline::is_given_up(Board& board) const noexcept {
    return any_rank(board.size(), [&](int rank) {
        return board.progress(rank, sequence_).has_given_up.load();
    });
}

JOINABLE_DEFINITION std::uint64_t
Pipeline::limit_of_lending(Board& board, int rank) const noexcept {
    if (board.progress(rank, sequence_).has_given_up.load()) {
        return 0;
    }
    bool const has_ring = board.line(rank, sequence_).payload[ArrivalLine::ring] != 0;
    return has_ring ? (std::min)(count_, taken_ + tuning::slices_per_ring) : count_;
}

JOINABLE_DEFINITION std::uint64_t
Pipeline::least(Board& board, std::atomic<std::uint64_t> ChunkProgress::* told) const noexcept {
    std::uint64_t least = count_;
    for (int rank = 0; rank < board.size(); ++rank) {
        least = (std::min)(least, (board.progress(rank, sequence_).*told).load());
    }
    return least;
}

}}} // namespace joinable::v0::detail
