// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cstddef>

#include <joinable/tensor/detail/rows.hpp>

namespace joinable::inline v0::detail {

/// Elements of a tile in each direction: a tile's rows are a few cache lines on both sides, and all
/// of it stays in the first-level cache.
template <class Bits>
inline constexpr std::size_t tile_size = sizeof(Bits) == 1 ? 128 : 256 / sizeof(Bits);

/// A 16-byte register of elements; every processor of interest has them.
template <class Bits>
struct register_of {
    using type [[gnu::vector_size(16)]] = Bits;
};

// Lists, because nvcc 13 loses the expansion of a pack in the arguments of this builtin.
template <std::size_t n, class Register>
[[gnu::always_inline]] inline Register interleave_low(Register a, Register b) noexcept {
    if constexpr (n == 2) {
        return __builtin_shufflevector(a, b, 0, 2);
    } else if constexpr (n == 4) {
        return __builtin_shufflevector(a, b, 0, 4, 1, 5);
    } else if constexpr (n == 8) {
        return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
    } else {
        return __builtin_shufflevector(
            a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
        );
    }
}
template <std::size_t n, class Register>
[[gnu::always_inline]] inline Register interleave_high(Register a, Register b) noexcept {
    if constexpr (n == 2) {
        return __builtin_shufflevector(a, b, 1, 3);
    } else if constexpr (n == 4) {
        return __builtin_shufflevector(a, b, 2, 6, 3, 7);
    } else if constexpr (n == 8) {
        return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
    } else {
        return __builtin_shufflevector(
            a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
        );
    }
}

/// Transposes a square of as many rows as a register has elements: interleaving the first half of
/// the rows with the second half, log2(rows) times, is a perfect shuffle of all index bits.
template <class Bits>
[[gnu::always_inline]] inline void
transpose_square(std::byte const* from, std::size_t from_step, std::byte* to, std::size_t to_step) {
    using Register = typename register_of<Bits>::type;
    constexpr std::size_t n = 16 / sizeof(Bits);
    std::array<Register, n> rows;
    for (std::size_t i = 0; i < n; ++i) {
        rows[i] = load<Register>(from + i * from_step);
    }
    for (std::size_t done = 1; done < n; done *= 2) {
        std::array<Register, n> next;
        for (std::size_t i = 0; i < n / 2; ++i) {
            next[2 * i] = interleave_low<n>(rows[i], rows[i + n / 2]);
            next[2 * i + 1] = interleave_high<n>(rows[i], rows[i + n / 2]);
        }
        rows = next;
    }
    for (std::size_t i = 0; i < n; ++i) {
        store<Register>(to + i * to_step, rows[i]);
    }
}

/// Writes element (i, k) of the source, at `i * row_step + k * column_step` bytes, to row k, column
/// i of `tile`, whose rows have `tile_size` elements. At most `tile_size` rows and columns.
template <class Bits>
JOINABLE_LOOP void load_transposed(
    std::byte const* from,
    std::size_t row_step,
    std::size_t rows,
    std::size_t column_step,
    std::size_t columns,
    std::byte* tile
) {
    constexpr std::size_t n = 16 / sizeof(Bits);
    constexpr std::size_t tile_step = tile_size<Bits> * sizeof(Bits);
    bool const dense = column_step == sizeof(Bits);
    std::size_t const even_rows = dense ? rows / n * n : 0;
    std::size_t const even_columns = dense ? columns / n * n : 0;
    for (std::size_t i = 0; i < even_rows; i += n) {
        for (std::size_t k = 0; k < even_columns; k += n) {
            transpose_square<Bits>(
                from + i * row_step + k * sizeof(Bits),
                row_step,
                tile + k * tile_step + i * sizeof(Bits),
                tile_step
            );
        }
    }
    for (std::size_t i = 0; i < rows; ++i) { // what squares leave over at the edges
        for (std::size_t k = i < even_rows ? even_columns : 0; k < columns; ++k) {
            store<Bits>(
                tile + k * tile_step + i * sizeof(Bits),
                load<Bits>(from + i * row_step + k * column_step)
            );
        }
    }
}

} // namespace joinable::inline v0::detail
