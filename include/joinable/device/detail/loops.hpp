// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include <joinable/device/detail/transpose.hpp>
#include <joinable/reduction/rows.hpp>
#include <joinable/tensor/shape.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The order in which to visit the elements of two views of the same extents. The target's smallest
/// step is innermost, since writes cost more than reads. Dimensions of extent 1 are dropped, and
/// neighbours are merged if both views step through them evenly. Steps are in bytes.
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

    /// Outermost first.
    [[nodiscard]] std::span<Level const> levels() const noexcept { return {levels_.data(), rank_}; }
    /// The innermost loop: a row.
    [[nodiscard]] Level const& inner() const noexcept { return levels_[rank_ - 1]; }

    /// Whether the source is read across its rows. The two innermost loops then run over tiles, and
    /// `across()` is the loop with small steps in the source.
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
        for (; across + 2 < rank_; ++across) { // to the place before the innermost one
            std::swap(levels_[across], levels_[across + 1]);
        }
    }

    std::array<Level, max_tensor_rank> levels_{}; ///< outermost first
    std::size_t rank_ = 0;
    bool has_tiles_ = false;
};

/// How a plane is transposed: in tiles of this many columns and rows.
struct Tiling {
    void (*transpose)(Plane);
    std::size_t columns;
    std::size_t rows;
    bool is_direct;   ///< writes to the target, else into a buffer
    bool is_in_cache; ///< fits in the second-level cache
};

/// The length of a buffered tile's sides, in elements. At this length the processor prefetches rows
/// on both sides. In cache, half of it is enough and stays in the first level.
template <class Bits>
inline constexpr std::size_t large_tile = sizeof(Bits) == 1 ? 256 : 512 / sizeof(Bits);

/// The tiling of `plane` for a processor. If elements are only moved, from a dense source to a
/// dense target, they go there directly in two cases: the plane fits in cache and its rows do not
/// evict each other, or it fits in no cache (memcpy then writes past the caches, too).
template <class Bits>
Tiling tiling_of(Plane const& plane, bool is_dense, InstructionSet set) noexcept {
    auto* const transpose = TransposeLoops<Bits>::of(set);
    bool const is_wide = set == InstructionSet::avx512;
    std::size_t const bytes = plane.rows * plane.columns * sizeof(Bits);
    bool const is_in_cache = bytes <= std::size_t{1} << 20U;
    // This many rows of the target keep their lines in a first-level cache of 8 ways of 4 KiB.
    std::size_t const power = std::size_t{1} << std::countr_zero(plane.to_step | 4096U);
    std::size_t const run = (std::min)((is_wide ? 128 : 64) / sizeof(Bits), 8 * 4096 / power);
    if (is_dense && is_in_cache && run * sizeof(Bits) >= 64) {
        return {transpose, run, plane.rows, true, true};
    }
    bool const is_aligned = (reinterpret_cast<std::uintptr_t>(plane.to) | plane.to_step) % 64 == 0;
    if (is_dense && is_wide && is_aligned && bytes >= std::size_t{16} << 20U) {
        return {
            &TransposeLoops<Bits, true>::avx512, 512 / sizeof(Bits), 256 / sizeof(Bits), true, false
        };
    }
    std::size_t const size = large_tile<Bits> / (is_in_cache ? 2 : 1);
    return {transpose, size, size, false, is_in_cache};
}

/// Calls f with an unsigned integer of `bytes` bytes: 1, 2, 4 or 8.
template <class F>
auto visit_bits(std::size_t bytes, F const& f) {
    switch (bytes) {
    case 1: return f(std::uint8_t{});
    case 2: return f(std::uint16_t{});
    case 4: return f(std::uint32_t{});
    default: return f(std::uint64_t{});
    }
}

/// An operation on rows, whose elements may have any type.
struct RowsOperation {
    RowsFunction* function;
    void const* operation;
    std::size_t element_bytes;
    bool only_moves;

    void operator()(
        Rows<std::byte const> from, Rows<std::byte> to, std::size_t count, std::size_t rows
    ) const {
        function(operation, from, to, count, rows);
    }
};

/// Applies `operation` to planes whose sources are read across. Tiles are first transposed, into a
/// buffer or directly to the target, so that each cache line is touched once.
inline void
for_all_tiles(Loops& loops, std::byte const* from, std::byte* to, RowsOperation const& operation) {
    constexpr std::size_t buffer_bytes =
        large_tile<std::uint16_t> * large_tile<std::uint16_t> * sizeof(std::uint16_t); // the most
    alignas(64) std::array<std::byte, buffer_bytes> buffer;
    Loops::Level const inner = loops.inner();
    Loops::Level const across = loops.across();
    std::size_t const size = operation.element_bytes;
    bool const is_dense = operation.only_moves && inner.to == size && across.from == size;
    loops.for_each(from, to, [&](std::byte const* source, std::byte* target) {
        Plane const plane{
            source, inner.from, inner.extent, across.from, across.extent, target, across.to
        };
        Tiling const tiling = visit_bits(size, [&]<class Bits>(Bits) {
            return tiling_of<Bits>(plane, is_dense, instruction_set());
        });
        auto const tile_at = [&](std::size_t i, std::size_t k) {
            Plane tile = plane;
            tile.from += i * plane.row_step + k * plane.column_step;
            tile.rows = (std::min)(tiling.rows, plane.rows - i);
            tile.columns = (std::min)(tiling.columns, plane.columns - k);
            tile.to += i * inner.to + k * plane.to_step;
            return tile;
        };
        for (std::size_t k = 0; k < plane.columns; k += tiling.columns) {
            for (std::size_t i = 0; i < plane.rows; i += tiling.rows) {
                Plane tile = tile_at(i, k);
                Rows<std::byte> const rows{tile.to, inner.to, tile.to_step};
                if (!tiling.is_direct) {
                    tile.to = buffer.data();
                    tile.to_step = tiling.rows * size;
                }
                tiling.transpose(tile);
                if (!tiling.is_in_cache && i + tiling.rows < plane.rows) {
                    prefetch(tile_at(i + tiling.rows, k)); // no processor predicts a step of rows
                }
                if (!tiling.is_direct) {
                    operation({tile.to, size, tile.to_step}, rows, tile.rows, tile.columns);
                }
            }
        }
    });
}

/// Applies `operation` to all elements of two views.
inline void
for_all_rows(Loops& loops, std::byte const* from, std::byte* to, RowsOperation const& operation) {
    if (loops.has_tiles()) {
        return for_all_tiles(loops, from, to, operation);
    }
    Loops::Level const inner = loops.inner();
    loops.for_each(from, to, [&](std::byte const* source, std::byte* target) {
        operation({source, inner.from}, {target, inner.to}, inner.extent, 1);
    });
}

}}} // namespace joinable::v0::detail
