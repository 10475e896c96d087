// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <joinable/communicator/algorithms/detail/message_step.hpp>
#include <joinable/communicator/algorithms/plan.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The ranks that take part in an algorithm, numbered from 0. The first surplus ranks are the even
/// ones; the next rank takes part for each of them.
struct Folding {
    int ranks = 1;
    int count = 1;

    [[nodiscard]] constexpr int surplus() const noexcept { return ranks - count; }
    [[nodiscard]] constexpr int rank_of(int index) const noexcept {
        return index < surplus() ? 2 * index + 1 : index + surplus();
    }
    /// Negative for a surplus rank.
    [[nodiscard]] constexpr int index_of(int rank) const noexcept {
        if (rank >= 2 * surplus()) {
            return rank - surplus();
        }
        return rank % 2 == 1 ? rank / 2 : -1;
    }
};

/// Rings of participants. Each has `extent` participants that are `stride` apart. An extent of 2
/// makes partners, which exchange halves. A folded ring has the even participants in ascending order,
/// then the odd ones in descending order.
struct Ring {
    int stride = 1;
    int extent = 1;
    bool is_folded = false;

    [[nodiscard]] constexpr int position_of(int index) const noexcept {
        int const place = place_of(index);
        return !is_folded ? place : place % 2 == 0 ? place / 2 : extent - 1 - place / 2;
    }
    /// The participant at another position of the ring of `index`.
    [[nodiscard]] constexpr int at(int position, int index) const noexcept {
        int const place = !is_folded              ? position
                          : 2 * position < extent ? 2 * position
                                                  : 2 * (extent - 1 - position) + 1;
        return index + (place - place_of(index)) * stride;
    }

private:
    [[nodiscard]] constexpr int place_of(int index) const noexcept {
        return index / stride % extent;
    }
};

/// Blocks that arrive one after another, each in pieces, and are combined. It tells which step does
/// what.
///
/// A whole block is combined before it is sent on. A piece of a block is combined while the next
/// piece travels, and is sent on after that, because there are at least two.
class Pieces {
public:
    Pieces() = default;
    Pieces(std::int64_t blocks, std::size_t longest_block, std::size_t segment) noexcept
        : of_block_{static_cast<std::int64_t>(segments_of(longest_block, segment))},
          count_{blocks * of_block_} {}

    [[nodiscard]] std::int64_t count() const noexcept { return count_; }
    [[nodiscard]] std::int64_t steps() const noexcept {
        return of_block_ == 1 ? 2 * count_ : count_ + (count_ == 0 ? 0 : 1);
    }
    /// The piece that travels in a step; negative: none.
    [[nodiscard]] std::int64_t received_in(std::int64_t step) const noexcept {
        if (of_block_ == 1) {
            return step % 2 == 0 ? step / 2 : -1;
        }
        return step < count_ ? step : -1;
    }
    /// The piece that is combined in a step; negative: none.
    [[nodiscard]] std::int64_t combined_in(std::int64_t step) const noexcept {
        if (of_block_ == 1) {
            return step % 2 == 0 ? -1 : step / 2;
        }
        return step - 1;
    }
    [[nodiscard]] std::int64_t block_of(std::int64_t piece) const noexcept {
        return of_block_ == 1 ? piece : piece / of_block_;
    }
    [[nodiscard]] int slot_of(std::int64_t piece) const noexcept {
        return of_block_ == 1 ? 0 : static_cast<int>(piece % 2);
    }
    /// A piece of its block.
    [[nodiscard]] ElementRange range(ElementRange block, std::int64_t piece) const noexcept {
        return of_block_ == 1 ? block
                              : block.part(
                                    static_cast<std::size_t>(piece % of_block_),
                                    static_cast<std::size_t>(of_block_)
                                );
    }
    [[nodiscard]] Transfer
    transfer(int peer, int slot, ElementRange block, std::int64_t piece) const noexcept {
        ElementRange const elements = range(block, piece);
        return elements.is_empty() ? Transfer{} : Transfer{peer, slot, elements};
    }

private:
    std::int64_t of_block_ = 1;
    std::int64_t count_ = 0;
};

/// The steps of one participant along its ring. A range has one block for each position.
class RingSteps {
public:
    RingSteps() = default;
    RingSteps(
        Ring ring, Folding folding, int index, ElementRange range, std::size_t segment
    ) noexcept
        : extent_{ring.extent}, position_{ring.position_of(index)},
          next_{folding.rank_of(ring.at(modulo(position_ + 1), index))},
          last_{folding.rank_of(ring.at(modulo(position_ + extent_ - 1), index))},
          begin_{range.begin}, least_{range.size() / static_cast<std::size_t>(extent_)},
          longer_{range.size() % static_cast<std::size_t>(extent_)},
          pieces_{extent_ - 1, least_ + (longer_ == 0 ? 0 : 1), segment} {}

    /// Combines block p of the range over the ring; the result is at position p. Each block starts
    /// at the next position and is combined with the block of each rank that it reaches.
    [[nodiscard]] bool scatter(std::int64_t number, MessageStep& step) const noexcept {
        if (number >= pieces_.steps()) {
            return false;
        }
        if (std::int64_t const piece = pieces_.received_in(number); piece >= 0) {
            std::int64_t const block = position_ - pieces_.block_of(piece);
            step.send = pieces_.transfer(next_, Transfer::in_place, block_at(block - 1), piece);
            step.receive =
                pieces_.transfer(last_, pieces_.slot_of(piece), block_at(block - 2), piece);
        }
        if (std::int64_t const piece = pieces_.combined_in(number); piece >= 0) {
            ElementRange const block = block_at(position_ - pieces_.block_of(piece) - 2);
            step.combine = {pieces_.slot_of(piece), true, pieces_.range(block, piece)};
        }
        return true;
    }
    /// Distributes block p of position p to all positions.
    [[nodiscard]] bool gather(std::int64_t number, MessageStep& step) const noexcept {
        if (number >= extent_ - 1) {
            return false;
        }
        ElementRange const sent = block_at(position_ - number);
        ElementRange const received = block_at(position_ - number - 1);
        step.send = sent.is_empty() ? Transfer{} : Transfer{next_, Transfer::in_place, sent};
        step.receive =
            received.is_empty() ? Transfer{} : Transfer{last_, Transfer::in_place, received};
        return true;
    }

private:
    [[nodiscard]] int modulo(int position) const noexcept {
        return position >= extent_ ? position - extent_ : position;
    }
    /// @pre -extent <= position < extent
    [[nodiscard]] ElementRange block_at(std::int64_t position) const noexcept {
        auto const index = static_cast<std::size_t>(position < 0 ? position + extent_ : position);
        std::size_t const first = begin_ + least_ * index + (std::min)(index, longer_);
        return {first, first + least_ + (index < longer_ ? 1 : 0)};
    }

    int extent_ = 1;
    int position_ = 0;
    int next_ = 0;
    int last_ = 0;
    std::size_t begin_ = 0;
    std::size_t least_ = 0;  ///< elements of a shorter block
    std::size_t longer_ = 0; ///< the number of blocks with one more
    Pieces pieces_;
};

}}} // namespace joinable::v0::detail
