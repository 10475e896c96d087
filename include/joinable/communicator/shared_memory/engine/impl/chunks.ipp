// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/shared_memory/engine/chunks.hpp>

#include <algorithm>
#include <atomic>

#include <joinable/communicator/detail/ranks.hpp>
#include <joinable/communicator/shared_memory/board/tuning.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION
Cut::Cut(Exchange const& exchange, std::size_t element, int world_size) noexcept {
    for (int b = 0; b < exchange.blocks(); ++b) {
        total += exchange.size_of_block(b);
    }
    std::size_t const bytes = total * element;
    auto const ranks = static_cast<std::size_t>(world_size);
    // Small messages have one chunk per rank, as long as taking over half of one would save less
    // than moving a line between two processors. Other chunks are small enough that all ranks end
    // together, and large enough that claiming costs nothing.
    std::size_t const wanted =
        bytes <= tuning::one_chunk_bytes
            ? bytes / ranks
            : (std::min)(bytes / (tuning::chunks_per_rank * ranks), tuning::largest_chunk_bytes);
    constexpr std::size_t line = 64;
    chunk = (wanted / line + 1) * line / element;
    chunks = (total + chunk - 1) / chunk;
}

JOINABLE_DEFINITION bool
chunks_are_done(Board& board, std::uint64_t sequence, Cut const& cut) noexcept {
    std::uint64_t done = 0;
    for (int rank = 0; rank < board.size(); ++rank) {
        done += board.progress(rank, sequence).done.load();
    }
    return done == cut.chunks;
}

JOINABLE_DEFINITION bool
has_unclaimed(Board& board, std::uint64_t sequence, Cut const& cut, int owner) noexcept {
    auto const claimed = board.progress(owner, sequence).claimed.load(std::memory_order_relaxed);
    return claimed < cut.share_of(owner, board.size());
}

JOINABLE_DEFINITION bool
has_unclaimed(Board& board, std::uint64_t sequence, Cut const& cut) noexcept {
    return any_rank(board.size(), [&](int owner) {
        return has_unclaimed(board, sequence, cut, owner);
    });
}

JOINABLE_DEFINITION bool run_chunks(
    Board& board,
    std::uint64_t sequence,
    Descriptor const& signature,
    Cut const& cut,
    int rank,
    int shares,
    Worker worker
) {
    int const ranks = board.size();
    std::uint64_t done = 0;
    bool computes = false;
    for (int k = 0; k < shares; ++k) {
        int const owner = rank + k < ranks ? rank + k : rank + k - ranks;
        std::size_t const first = cut.first_of(owner, ranks);
        std::size_t const share = cut.share_of(owner, ranks);
        std::atomic<std::uint64_t>& claimed = board.progress(owner, sequence).claimed;
        while (claimed.load(std::memory_order_relaxed) < share) {
            if (!computes) {
                board.begin_computing(rank, worker, sequence);
                computes = true;
            }
            std::uint64_t const mine = claimed.fetch_add(1);
            if (mine >= share) {
                break;
            }
            std::size_t const begin = (first + static_cast<std::size_t>(mine)) * cut.chunk;
            Exchange{board, sequence, signature}.run(
                begin, (std::min)(cut.total, begin + cut.chunk)
            );
            ++done;
        }
    }
    if (computes) {
        if (done != 0) {
            board.progress(rank, sequence).done.fetch_add(done);
        }
        board.end_computing(rank, worker);
        board.room.wake(); // after that: a rank may wait for chunks, or until nobody computes any
    }
    return chunks_are_done(board, sequence, cut);
}

}}} // namespace joinable::v0::detail
