// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>

#include <joinable/communicator/shared_memory/board/board.hpp>
#include <joinable/communicator/shared_memory/engine/exchange.hpp>
#include <joinable/config.hpp>

/// @file
/// How the ranks that have arrived in a large collective share its work. Each rank starts with its
/// own share, whose data is still in its caches from the last time, and then takes over chunks from
/// others. No rank therefore waits for a busy one.

namespace joinable { inline namespace v0 { namespace detail {

/// A large message is divided into `chunks` ranges of `chunk` elements, the same on every rank.
struct Cut {
    std::size_t total = 0;
    std::size_t chunk = 1;
    std::size_t chunks = 0;

    Cut() = default;
    Cut(Exchange const& exchange, std::size_t element, int world_size) noexcept;

    /// The first chunk of a rank's share, which ends at the first chunk of the next rank.
    [[nodiscard]] std::size_t first_of(int rank, int world_size) const noexcept {
        return chunks * static_cast<std::size_t>(rank) / static_cast<std::size_t>(world_size);
    }
    /// The number of chunks in the share.
    [[nodiscard]] std::size_t share_of(int rank, int world_size) const noexcept {
        return first_of(rank + 1, world_size) - first_of(rank, world_size);
    }
};

[[nodiscard]] bool chunks_are_done(Board& board, std::uint64_t sequence, Cut const& cut) noexcept;

/// Whether some chunk will never be done, because the rank that had claimed it died and the board
/// has a reason. All ranks find the same. @pre all chunks are claimed
[[nodiscard]] inline bool
chunks_are_lost(Board& board, std::uint64_t sequence, Cut const& cut) noexcept {
    return board.is_aborted() && board.may_be_lost(sequence) &&
           !chunks_are_done(board, sequence, cut);
}

[[nodiscard]] bool
has_unclaimed(Board& board, std::uint64_t sequence, Cut const& cut, int owner) noexcept;
/// Whether any rank's share has unclaimed chunks.
[[nodiscard]] bool has_unclaimed(Board& board, std::uint64_t sequence, Cut const& cut) noexcept;

/// A worker of `rank` computes chunks until none is left to claim in `shares` shares, starting with
/// its own. Returns whether all chunks are done, by any worker.
bool run_chunks(
    Board& board,
    std::uint64_t sequence,
    Descriptor const& signature,
    Cut const& cut,
    int rank,
    int shares,
    Worker worker = Worker::rank
);

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/shared_memory/engine/impl/chunks.ipp>
#endif
