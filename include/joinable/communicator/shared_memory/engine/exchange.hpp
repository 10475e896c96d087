// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include <joinable/communicator/pieces.hpp>
#include <joinable/communicator/shared_memory/board/board.hpp>
#include <joinable/config.hpp>
#include <joinable/error.hpp>

/// @file
/// The work of a collective in which all ranks have arrived. Nothing here waits, and any rank can
/// do the work for all.

namespace joinable { inline namespace v0 { namespace detail {

/// Stands for a rank: the block is reduced from all ranks, or goes to all ranks.
inline constexpr int every_rank = -1;

/// A part of a large collective: `size` elements. They start at `in_at` in the input of rank
/// `from`, and at `out_at` in the output of rank `to`.
struct Block {
    std::size_t size;
    int from = every_rank;
    int to = every_rank;
    std::size_t in_at = 0;
    std::size_t out_at = 0;
};

/// The addresses at which one rank itself finds its buffers, if the others use different ones.
struct OwnPlace {
    int rank = -1;           ///< none
    std::byte* in = nullptr; ///< only read from
    std::byte* out = nullptr;
    /// If there are some, they are the input, and the output if `out` is null.
    BufferPieces pieces = {};
};

/// A collective in which all ranks have arrived, as blocks to move or reduce. Blocks are numbered,
/// and all ranks number them alike.
class Exchange {
public:
    Exchange(
        Board& board, std::uint64_t sequence, Descriptor const& signature, OwnPlace const& own = {}
    ) noexcept
        : board_{board}, sequence_{sequence}, signature_{signature}, own_{own} {}

    [[nodiscard]] int blocks() const noexcept;

    /// The number of elements in block `b`, without computing its place.
    [[nodiscard]] std::size_t size_of_block(int b) const noexcept;

    /// Linear in the number of ranks.
    [[nodiscard]] Block block(int b) const noexcept;

    /// Computes the elements [begin, end) of all blocks, one after another, for all ranks.
    void run(std::size_t begin, std::size_t end) const;

private:
    /// Ranks that split gather what they chose.
    [[nodiscard]] Collective moved() const noexcept {
        return signature_.collective == split_collective ? Collective::all_gather
                                                         : signature_.collective;
    }
    /// The number of elements that rank `from` sends to rank `to`.
    [[nodiscard]] std::size_t share(int from, int to) const noexcept;

    /// The pieces of a rank's input; none if that is in one place.
    [[nodiscard]] BufferPieces pieces_of(int rank) const noexcept;
    /// Up to which element, at most `end`, every rank has the elements from `begin` on in one place.
    [[nodiscard]] std::size_t end_of_pieces(std::size_t begin, std::size_t end) const noexcept;
    /// The address of byte `offset` in a rank's input or output. If it is in a ring, the bytes
    /// up to the end of the slice follow it; if it is in pieces, those up to the end of the piece.
    [[nodiscard]] std::byte* shared(int rank, std::size_t word, std::size_t offset) const noexcept;
    [[nodiscard]] std::byte* input(int rank, std::size_t offset) const noexcept {
        return rank == own_.rank ? own(own_.pieces.number == 0 ? own_.in : nullptr, offset)
                                 : shared(rank, ArrivalLine::in, offset);
    }
    [[nodiscard]] std::byte* output(int rank, std::size_t offset) const noexcept {
        return rank == own_.rank ? own(own_.out, offset) : shared(rank, ArrivalLine::out, offset);
    }
    /// Byte `offset` of the rank's own buffer, or of its pieces if that is null.
    [[nodiscard]] std::byte* own(std::byte* buffer, std::size_t offset) const noexcept {
        return buffer != nullptr
                   ? buffer + offset
                   : static_cast<std::byte*>(BufferPiece::of_address(own_.pieces.address_of(offset))
                     );
    }

    void run_part(Block const& block, std::size_t begin, std::size_t end) const;

    Board& board_;
    std::uint64_t sequence_;
    Descriptor const& signature_;
    OwnPlace own_;
};

/// Whether all ranks have arrived for the same collective. With counts, their tables are compared
/// too.
bool say_the_same(Board& board, std::uint64_t sequence) noexcept;

/// Why the ranks' calls do not match, or nothing. All ranks compute the same from the same lines
/// and tables.
std::optional<AbortReason>
disagreement(Board& board, std::uint64_t sequence, Descriptor const& mine);

/// The address of each rank's contribution to a small message.
[[nodiscard]] std::byte*
contribution(Board& board, std::uint64_t sequence, int rank, bool is_on_line) noexcept;

/// A small message: every rank reads all contributions and combines them by itself.
void combine_contributions(
    Board& board,
    std::uint64_t sequence,
    Descriptor const& signature,
    bool is_on_line,
    int rank,
    void* out
);

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/shared_memory/engine/impl/exchange.ipp>
#endif
