// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>

#include <joinable/communicator/shared_memory/board/board.hpp>
#include <joinable/communicator/shared_memory/engine/exchange.hpp>
#include <joinable/config.hpp>

/// @file
/// How the ranks that have arrived in a large collective share its work. Each has a share of its own,
/// so that what it computed last time is still in its caches, and takes over from others when it is
/// through: so nobody waits for a rank that computes something else.

namespace joinable { inline namespace v0 { namespace detail {

/// A large message is cut into `chunks` ranges of `chunk` elements, the same on every rank.
struct Cut {
    std::size_t total = 0;
    std::size_t chunk = 1;
    std::size_t chunks = 0;

    Cut() = default;
    Cut(Exchange const& exchange, std::size_t element, int world_size) noexcept;

    /// The chunks of a rank's share are those from its first up to the first of the next rank.
    [[nodiscard]] std::size_t first_of(int rank, int world_size) const noexcept {
        return chunks * static_cast<std::size_t>(rank) / static_cast<std::size_t>(world_size);
    }
    /// How many they are.
    [[nodiscard]] std::size_t share_of(int rank, int world_size) const noexcept {
        return first_of(rank + 1, world_size) - first_of(rank, world_size);
    }
};

[[nodiscard]] bool chunks_are_done(Board& board, std::uint64_t sequence, Cut const& cut) noexcept;

/// Whether some chunk will never be done: the rank that had claimed it died, and the board says why.
/// All ranks find the same. @pre all chunks are claimed
[[nodiscard]] inline bool
chunks_are_lost(Board& board, std::uint64_t sequence, Cut const& cut) noexcept {
    return board.is_aborted() && board.may_be_lost(sequence) &&
           !chunks_are_done(board, sequence, cut);
}

[[nodiscard]] bool
has_unclaimed(Board& board, std::uint64_t sequence, Cut const& cut, int owner) noexcept;
/// Of any rank's share.
[[nodiscard]] bool has_unclaimed(Board& board, std::uint64_t sequence, Cut const& cut) noexcept;

/// A worker of `rank` computes chunks until none is left to claim in `shares` shares, of which its own
/// is the first. Whether all are done, by whomever.
bool run_chunks(
    Board& board,
    std::uint64_t sequence,
    Descriptor const& said,
    Cut const& cut,
    int rank,
    int shares,
    Worker worker = Worker::rank
);

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/shared_memory/engine/chunks.ipp>
#endif
