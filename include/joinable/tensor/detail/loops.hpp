// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <type_traits>

#include <joinable/tensor/detail/rows.hpp>
#include <joinable/tensor/detail/transpose.hpp>
#include <joinable/tensor/shape.hpp>

namespace joinable::inline v0::detail {

/// The order in which the elements of two views of the same extents are visited: the target's
/// smallest step innermost, since writes cost more than reads; dimensions of extent 1 dropped;
/// neighbours merged where both views step through them evenly. Steps are in bytes.
class Loops {
public:
    Loops(Shape const& extents, Shape const& from, Shape const& to, std::size_t element_bytes) {
        Shape order;
        for (std::size_t d = 0; d < extents.size(); ++d) {
            if (extents[d] == 1) {
                continue;
            }
            order.push_back(d);
            for (std::size_t i = order.size() - 1; i > 0; --i) { // insertion sort of at most eight
                std::size_t const outer = order[i - 1];
                if (to[outer] > to[d] || (to[outer] == to[d] && from[outer] >= from[d])) {
                    break;
                }
                order[i] = outer;
                order[i - 1] = d;
            }
        }
        for (std::size_t const d : order) {
            std::size_t const from_step = from[d] * element_bytes;
            std::size_t const to_step = to[d] * element_bytes;
            if (rank_ != 0 && levels_[rank_ - 1].from == extents[d] * from_step &&
                levels_[rank_ - 1].to == extents[d] * to_step) {
                levels_[rank_ - 1] = {
                    levels_[rank_ - 1].extent * extents[d], from_step, to_step, 0
                };
            } else {
                levels_[rank_++] = {extents[d], from_step, to_step, 0};
            }
        }
        if (rank_ == 0) { // a single element
            levels_[rank_++] = {1, element_bytes, element_bytes, 0};
        }
        choose_tiles();
    }

    struct Level {
        std::size_t extent;
        std::size_t from;
        std::size_t to;
        std::size_t index;
    };

    /// The innermost loop: a row.
    [[nodiscard]] Level const& inner() const noexcept { return levels_[rank_ - 1]; }

    /// Whether the source is read across its rows: then the two innermost loops go by tiles, and
    /// `across()` is the one whose steps are small in the source.
    [[nodiscard]] bool has_tiles() const noexcept { return has_tiles_; }
    [[nodiscard]] Level const& across() const noexcept { return levels_[rank_ - 2]; }

    /// Calls `body(from, to)` at the start of every row, or of every plane if there are tiles.
    template <class Body>
    void for_each(std::byte const* from, std::byte* to, Body const& body) {
        std::size_t const outer = rank_ - (has_tiles_ ? 2 : 1);
        for (;;) {
            body(from, to);
            std::size_t d = outer;
            for (;; --d) { // an odometer
                if (d == 0) {
                    return;
                }
                Level& level = levels_[d - 1];
                from += level.from;
                to += level.to;
                if (++level.index < level.extent) {
                    break;
                }
                from -= level.from * level.extent;
                to -= level.to * level.extent;
                level.index = 0;
            }
        }
    }

private:
    void choose_tiles() noexcept {
        std::size_t across = rank_ - 1;
        for (std::size_t d = 0; d + 1 < rank_; ++d) { // a step of 0 reads nothing new
            if (levels_[d].from != 0 && levels_[d].from < levels_[across].from) {
                across = d;
            }
        }
        has_tiles_ = across != rank_ - 1;
        if (has_tiles_) {
            auto const first = levels_.begin() + static_cast<std::ptrdiff_t>(across);
            auto const last = levels_.begin() + static_cast<std::ptrdiff_t>(rank_) - 1;
            std::rotate(first, first + 1, last);
        }
    }

    std::array<Level, max_tensor_rank> levels_{}; ///< outermost first
    std::size_t rank_ = 0;
    bool has_tiles_ = false;
};

/// Applies `rows_function(from, to, count, rows)` to the rows of a plane whose source is read across:
/// each tile is transposed into a buffer first, so that a cache line of either side is touched once.
template <class Bits, class RowsFunction>
void for_each_tile(
    Loops::Level const& across,
    Loops::Level const& inner,
    std::byte const* from,
    std::byte* to,
    RowsFunction const& rows_function
) {
    auto* const load = instruction_set() == InstructionSet::baseline ? &load_transposed<Bits>
                                                                     : &load_transposed_avx2<Bits>;
    bool const is_large = inner.extent > (std::size_t{1} << 20U) / sizeof(Bits) / across.extent;
    std::size_t const size = is_large ? large_tile<Bits> : small_tile<Bits>;
    std::size_t const step = size * sizeof(Bits);
    alignas(64) std::array<std::byte, large_tile<Bits> * large_tile<Bits> * sizeof(Bits)> tile;
    for (std::size_t i = 0; i < across.extent; i += size) {
        std::size_t const rows = (std::min)(size, across.extent - i);
        for (std::size_t k = 0; k < inner.extent; k += size) {
            std::size_t const count = (std::min)(size, inner.extent - k);
            std::byte const* const source = from + k * inner.from + i * across.from;
            std::byte* const target = to + k * inner.to + i * across.to;
            load(source, inner.from, count, across.from, rows, tile.data(), step);
            if (is_large && k + size < inner.extent) { // no processor foresees a step of rows
                prefetch_rows(
                    source + size * inner.from,
                    inner.from,
                    (std::min)(size, inner.extent - k - size),
                    rows * across.from
                );
            }
            rows_function(
                Rows<std::byte const>{tile.data(), sizeof(Bits), step},
                Rows<std::byte>{target, inner.to, across.to},
                count,
                rows
            );
        }
    }
}

/// Applies `rows_function(from, to, count, rows)`, which takes two `Rows`, to all elements of two views.
template <class Bits, class RowsFunction>
void for_all_rows(
    Loops& loops, std::byte const* from, std::byte* to, RowsFunction const& rows_function
) {
    Loops::Level const inner = loops.inner();
    if (loops.has_tiles()) {
        Loops::Level const across = loops.across();
        loops.for_each(from, to, [&](std::byte const* source, std::byte* target) {
            for_each_tile<Bits>(across, inner, source, target, rows_function);
        });
    } else {
        loops.for_each(from, to, [&](std::byte const* source, std::byte* target) {
            rows_function(
                Rows<std::byte const>{source, inner.from},
                Rows<std::byte>{target, inner.to},
                inner.extent,
                std::size_t{1}
            );
        });
    }
}

} // namespace joinable::inline v0::detail
