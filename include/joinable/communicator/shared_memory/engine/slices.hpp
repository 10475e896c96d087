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
#include <joinable/error.hpp>

/// @file
/// How a large collective makes progress where some rank's buffer is out of the others' reach: in slices,
/// through a ring of each such rank that all reach. A slice is copied in, reduced and copied out while
/// it is in the caches, and a rank copies the next ones while others are still at the one before. Each
/// rank has a share of every slice, and no other takes it over: the rank must make its copies anyway.

namespace joinable { inline namespace v0 { namespace detail {

/// The parts of a message of `total` elements, the same on every rank.
struct Slices {
    std::size_t total = 0;
    std::size_t element = 1; ///< bytes
    std::size_t chunk = 1;   ///< elements of a slice that one rank computes
    int ranks = 1;

    Slices() = default;
    Slices(Board const& board, Descriptor const& said) noexcept;

    /// Whether such a collective could be cut: every rank finds what belongs together in the same
    /// place of its buffer.
    [[nodiscard]] static bool fit(Collective collective) noexcept {
        return collective == Collective::all_reduce || collective == Collective::broadcast ||
               collective == Collective::reduce || collective == Collective::scaled_all_reduce;
    }
    /// What a rank needs to have slices on their way; smaller messages are not cut.
    [[nodiscard]] static std::size_t ring_bytes(Board const& board) noexcept {
        return tuning::slices_per_ring * chunk_bytes(board) *
               static_cast<std::size_t>(board.size());
    }

    [[nodiscard]] std::size_t count() const noexcept;
    /// The elements [first, second) of a slice that are shared out to the ranks [from, to).
    [[nodiscard]] std::pair<std::size_t, std::size_t>
    range(std::size_t slice, int from, int to) const noexcept;

private:
    /// Whole cache lines.
    [[nodiscard]] static std::size_t chunk_bytes(Board const& board) noexcept;
};

/// How far one rank has got in it.
class Pipeline {
public:
    Pipeline() = default;
    /// @pre all ranks have arrived
    Pipeline(Board& board, std::uint64_t sequence, Descriptor const& said) noexcept
        : sequence_{sequence}, slices_{board, said}, count_{slices_.count()} {}

    [[nodiscard]] static bool is_needed(Board& board, std::uint64_t sequence) noexcept;

    /// Does all that can be done without the others. Whether this rank's buffers are final. `Memory`
    /// copies a range of bytes to this rank's ring, and from it.
    template <class Memory>
    bool advance(Board& board, Descriptor const& said, int rank, Memory& memory) {
        ChunkProgress& mine = board.progress(rank, sequence_);
        auto const own = memory.own(sequence_);
        auto* const in = static_cast<std::byte*>(const_cast<void*>(own.in)); // is only read
        OwnPlace const place{rank, in, static_cast<std::byte*>(own.out)};
        Exchange const exchange{board, sequence_, said, place};
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
            if (taken_ < done_by_all(board)) {
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
               taken_ < done_by_all(board);
    }

    /// For whom this rank waits, if it cannot advance.
    [[nodiscard]] std::vector<int> holding_up(Board& board) const;

    /// Whether this rank, which cannot advance, never will: because some rank that is not through has
    /// died, because one has given up, or because the deadline of one for which it waits is over.
    [[nodiscard]] bool is_lost(Board& board) const;
    /// Whether some rank still computes a slice, and with it in this rank's memory. Not one that has
    /// died, or whose deadline is over: its process has been stopped.
    /// @pre this rank has told that it gives up, so that nobody begins another one
    [[nodiscard]] bool is_in_use(Board& board) const;

private:
    [[nodiscard]] static bool is_overdue(AbortReason const& reason, int rank) noexcept;
    /// By any rank: then it does not expect anybody in its memory any more.
    [[nodiscard]] bool is_given_up(Board& board) const noexcept;
    [[nodiscard]] bool can_compute(Board& board) const noexcept {
        return computed_ < lent_by_all(board) && !is_given_up(board);
    }

    /// As bytes. Its own share a rank reads and writes where it is.
    template <class Copy>
    void for_shares_of_others(std::size_t slice, int rank, Copy const& copy) const {
        for (auto const& [begin, end] :
             {slices_.range(slice, 0, rank), slices_.range(slice, rank + 1, slices_.ranks)}) {
            copy(begin * slices_.element, end * slices_.element);
        }
    }
    [[nodiscard]] std::uint64_t limit_of_lending(Board& board, int rank) const noexcept;
    /// The least of a number that each rank tells.
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
    std::uint64_t count_ = 0;    ///< of slices; how many of them
    std::uint64_t lent_ = 0;     ///< this rank has copied in
    std::uint64_t computed_ = 0; ///< have its share done
    std::uint64_t taken_ = 0;    ///< it has copied out
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/shared_memory/engine/slices.ipp>
#endif
