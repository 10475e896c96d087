// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <joinable/communicator/shared_memory/board/board.hpp>
#include <joinable/communicator/shared_memory/board/tuning.hpp>
#include <joinable/communicator/shared_memory/engine/exchange.hpp>
#include <joinable/config.hpp>

/// @file
/// Moves a large collective in slices if other ranks cannot reach some rank's buffer. Each such
/// rank has a ring that all can reach. A slice is copied in, reduced and copied out while it is in
/// the caches. A rank copies the next slices while others still process the current one. Each rank
/// computes its share of every slice. No other rank takes it over, because the rank must make its
/// copies anyway.

namespace joinable { inline namespace v0 { namespace detail {

/// The parts of a message of `total` elements, the same on every rank.
struct Slices {
    std::size_t total = 0;
    std::size_t element = 1; ///< bytes
    std::size_t chunk = 1;   ///< elements of a slice that one rank computes
    int ranks = 1;

    Slices() = default;
    Slices(Board const& board, Descriptor const& signature) noexcept;

    /// Whether such a collective can be sliced: each rank must have corresponding elements at the
    /// same offset of its buffer.
    [[nodiscard]] static bool fit(Collective collective) noexcept {
        return collective == Collective::all_reduce || collective == Collective::broadcast ||
               collective == Collective::reduce || collective == Collective::scaled_all_reduce;
    }
    /// The bytes that a rank needs for its slices in flight. Smaller messages are not sliced.
    [[nodiscard]] static std::size_t ring_bytes(Board const& board) noexcept {
        return tuning::slices_per_ring * chunk_bytes(board) *
               static_cast<std::size_t>(board.size());
    }

    [[nodiscard]] std::size_t count() const noexcept;
    /// The elements [first, second) of a slice that belong to the shares of ranks [from, to).
    [[nodiscard]] std::pair<std::size_t, std::size_t>
    range(std::size_t slice, int from, int to) const noexcept;

private:
    /// Whole cache lines.
    [[nodiscard]] static std::size_t chunk_bytes(Board const& board) noexcept;
};

/// One rank's progress in a sliced collective.
class Pipeline {
public:
    Pipeline() = default;
    /// @pre all ranks have arrived
    Pipeline(Board& board, std::uint64_t sequence, Descriptor const& signature) noexcept
        : sequence_{sequence}, slices_{board, signature}, count_{slices_.count()} {}

    [[nodiscard]] static bool is_needed(Board& board, std::uint64_t sequence) noexcept;

    /// Does all that is possible without waiting. Returns whether this rank's buffers are final.
    /// `Memory` copies ranges of bytes to and from this rank's ring.
    template <class Memory>
    bool advance(Board& board, Descriptor const& signature, int rank, Memory& memory) {
        ChunkProgress& mine = board.progress(rank, sequence_);
        auto const own = memory.own(sequence_);
        auto* const in = static_cast<std::byte*>(const_cast<void*>(own.in)); // is only read
        bool const is_in_pieces = board.line(rank, sequence_).payload[ArrivalLine::pieces] != 0;
        OwnPlace const place{
            is_in_pieces ? -1 : rank,
            in,
            static_cast<std::byte*>(own.out),
            memory.own_pieces(sequence_)
        };
        Exchange const exchange{board, sequence_, signature, place};
        for (bool moves = true; moves;) {
            moves = false;
            if (lent_ < limit_of_lending(board, rank)) {
                for_shares_of_others(lent_, rank, [&](std::size_t begin, std::size_t end) {
                    memory.copy_in(sequence_, begin, end);
                });
                mine.lent.store(++lent_);
                board.room.wake();
                moves = true;
            }
            if (can_compute(board)) {
                board.begin_computing(rank, Worker::rank, sequence_);
                if (!is_given_up(board)) { // a rank that gives up from here on waits for the end
                    auto const [begin, end] = slices_.range(computed_, rank, rank + 1);
                    exchange.run(begin, end);
                    mine.done.store(++computed_);
                }
                board.end_computing(rank, Worker::rank);
                board.room.wake();
                moves = true;
            }
            if (taken_ < limit_of_taking(board, rank)) {
                for_shares_of_others(taken_, rank, [&](std::size_t begin, std::size_t end) {
                    memory.copy_out(sequence_, begin, end);
                });
                ++taken_;
                moves = true;
            }
        }
        return taken_ == count_;
    }

    [[nodiscard]] bool can_advance(Board& board, int rank) const noexcept {
        return lent_ < limit_of_lending(board, rank) || can_compute(board) ||
               taken_ < limit_of_taking(board, rank);
    }

    /// A sign of progress: how often this rank has advanced.
    [[nodiscard]] std::uint64_t moved() const noexcept { return lent_ + computed_ + taken_; }

    /// The other ranks for which `own`, this rank, waits, if it cannot advance. It does not name itself even if one
    /// of them has come meanwhile.
    [[nodiscard]] std::vector<int> holding_up(Board& board, int own) const;

    /// Whether `own`, this rank, which cannot advance, never will. That is so if an unfinished rank has
    /// died, if a rank has given up, or if the deadline of a rank for which it waits has passed.
    [[nodiscard]] bool is_lost(Board& board, int own) const;
    /// Whether some rank is still computing a slice and may access this rank's memory. Ranks that
    /// have died, or have been stopped past the deadline, do not count.
    /// @pre this rank has announced that it gives up, so that no rank begins another slice
    [[nodiscard]] bool is_in_use(Board& board) const;

private:
    /// Whether any rank has given up. It then expects no other rank in its memory any more.
    [[nodiscard]] bool is_given_up(Board& board) const noexcept;
    [[nodiscard]] bool can_compute(Board& board) const noexcept {
        return computed_ < lent_by_all(board) && !is_given_up(board);
    }

    /// Calls `copy` with byte ranges. A rank reads and writes its own share in place.
    template <class Copy>
    void for_shares_of_others(std::size_t slice, int rank, Copy const& copy) const {
        for (auto const& [begin, end] :
             {slices_.range(slice, 0, rank), slices_.range(slice, rank + 1, slices_.ranks)}) {
            copy(begin * slices_.element, end * slices_.element);
        }
    }
    // A rank that has given up may have freed its buffers.
    [[nodiscard]] std::uint64_t limit_of_lending(Board& board, int rank) const noexcept;
    [[nodiscard]] std::uint64_t limit_of_taking(Board& board, int rank) const noexcept {
        return board.progress(rank, sequence_).has_given_up.load() ? 0 : done_by_all(board);
    }
    /// The minimum of a number that each rank publishes.
    [[nodiscard]] std::uint64_t
    least(Board& board, std::atomic<std::uint64_t> ChunkProgress::* told) const noexcept;
    [[nodiscard]] std::uint64_t lent_by_all(Board& board) const noexcept {
        return least(board, &ChunkProgress::lent);
    }
    [[nodiscard]] std::uint64_t done_by_all(Board& board) const noexcept {
        return least(board, &ChunkProgress::done);
    }

    std::uint64_t sequence_ = 0;
    Slices slices_;
    std::uint64_t count_ = 0;    ///< slices in all
    std::uint64_t lent_ = 0;     ///< slices that this rank has copied in
    std::uint64_t computed_ = 0; ///< slices whose share it has computed
    std::uint64_t taken_ = 0;    ///< slices that it has copied out
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/shared_memory/engine/impl/slices.ipp>
#endif
