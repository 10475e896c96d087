// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include <joinable/communicator/shared_memory/board/board.hpp>
#include <joinable/config.hpp>
#include <joinable/error.hpp>

/// @file
/// What happens once all ranks have arrived in a collective: nothing here waits, and any rank can
/// do it for all.

namespace joinable { inline namespace v0 { namespace detail {

/// Stands for a rank: of a block that comes from all of them, reduced, or goes to all of them.
inline constexpr int every_rank = -1;

/// A part of a large collective: `size` elements, found from `in_at` on in the input of the rank
/// `from`, and wanted from `out_at` on in the output of the rank `to`.
struct Block {
    std::size_t size;
    int from = every_rank;
    int to = every_rank;
    std::size_t in_at = 0;
    std::size_t out_at = 0;
};

/// Where one rank finds its buffers itself, if that is not where the others find them.
struct OwnPlace {
    int rank = -1;           ///< none
    std::byte* in = nullptr; ///< only read
    std::byte* out = nullptr;
};

/// A collective in which all ranks have arrived, as the blocks that have to be moved or reduced.
/// Blocks are numbered, and every rank finds the same ones.
class Exchange {
public:
    Exchange(
        Board& board, std::uint64_t sequence, Descriptor const& said, OwnPlace const& own = {}
    ) noexcept
        : board_{board}, sequence_{sequence}, said_{said}, own_{own} {}

    [[nodiscard]] int blocks() const noexcept;

    /// The elements of block `b`, without looking for its place.
    [[nodiscard]] std::size_t size_of_block(int b) const noexcept;

    /// Linear in the number of ranks.
    [[nodiscard]] Block block(int b) const noexcept;

    /// Computes the elements [begin, end) of all blocks, one after another, for all ranks.
    void run(std::size_t begin, std::size_t end) const;

private:
    /// Elements that rank `from` sends to rank `to`.
    [[nodiscard]] std::size_t share(int from, int to) const noexcept;

    /// The byte at `offset` in a rank's input or output. If the rank has a ring, the bytes up to the end
    /// of the slice follow it.
    [[nodiscard]] std::byte* shared(int rank, std::size_t word, std::size_t offset) const noexcept;
    [[nodiscard]] std::byte* input(int rank, std::size_t offset) const noexcept {
        return rank == own_.rank ? own_.in + offset : shared(rank, ArrivalLine::in, offset);
    }
    [[nodiscard]] std::byte* output(int rank, std::size_t offset) const noexcept {
        return rank == own_.rank ? own_.out + offset : shared(rank, ArrivalLine::out, offset);
    }

    void run_part(Block const& block, std::size_t begin, std::size_t end) const;

    Board& board_;
    std::uint64_t sequence_;
    Descriptor const& said_;
    OwnPlace own_;
};

/// Whether all ranks have arrived for the same collective. Where there are counts, their tables tell.
bool say_the_same(Board& board, std::uint64_t sequence) noexcept;

/// Why the ranks' words do not fit together, if they do not: every rank computes the same from the
/// same lines and tables.
std::optional<AbortReason>
disagreement(Board& board, std::uint64_t sequence, Descriptor const& mine);

/// Where each rank puts what it contributes to a small message.
[[nodiscard]] std::byte*
contribution(Board& board, std::uint64_t sequence, int rank, bool is_on_line) noexcept;

/// A small message: every rank reads what all contribute and combines it for itself.
void combine_contributions(
    Board& board,
    std::uint64_t sequence,
    Descriptor const& said,
    bool is_on_line,
    int rank,
    void* out
);

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/shared_memory/engine/exchange.ipp>
#endif
