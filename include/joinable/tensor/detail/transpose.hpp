// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cstddef>
#include <cstring>

#include <joinable/tensor/detail/rows.hpp>

namespace joinable::inline v0::detail {

/// Elements of a tile in each direction. In cache all of it stays in the first level; else its rows
/// are so long that the processor fetches them ahead, on both sides.
template <class Bits>
inline constexpr std::size_t small_tile = sizeof(Bits) == 1 ? 128 : 256 / sizeof(Bits);
template <class Bits>
inline constexpr std::size_t large_tile = sizeof(Bits) == 1 ? 256 : 512 / sizeof(Bits);

/// Asks for the memory of rows that will be read soon.
inline void prefetch_rows(
    std::byte const* from, std::size_t row_step, std::size_t rows, std::size_t row_bytes
) noexcept {
    for (std::size_t i = 0; i < rows; ++i) {
        for (std::size_t at = 0; at < row_bytes; at += 64) {
            __builtin_prefetch(from + i * row_step + at);
        }
    }
}

/// Registers, of bytes: compilers find the instruction for larger elements in what moves together.
using Bytes16 [[gnu::vector_size(16)]] = unsigned char;
using Bytes32 [[gnu::vector_size(32)]] = unsigned char;

/// Which byte of two registers, one behind the other, is byte i when elements of `size` bytes of their
/// low or high halves are interleaved. A register of 32 bytes is two of 16 side by side.
template <std::size_t width, std::size_t size, bool high>
constexpr int interleaved(std::size_t i) noexcept {
    std::size_t const element = i % 16 / size;
    std::size_t const start = i / 16 * 16 + (high ? 8 : 0);
    return static_cast<int>(start + element % 2 * width + element / 2 * size + i % size);
}

// Lists, because nvcc 13 loses the expansion of a pack in the arguments of this builtin.
template <std::size_t size, bool high>
[[gnu::always_inline]] inline void
interleave(Bytes16 const& a, Bytes16 const& b, Bytes16& result) noexcept {
    constexpr auto at = &interleaved<16, size, high>;
    // clang-format off
    result = __builtin_shufflevector(
        a, b,
        at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(8), at(9), at(10),
        at(11), at(12), at(13), at(14), at(15)
    );
    // clang-format on
}
template <std::size_t size, bool high>
JOINABLE_INLINE_AVX2 void interleave(Bytes32 const& a, Bytes32 const& b, Bytes32& result) noexcept {
    constexpr auto at = &interleaved<32, size, high>;
    // clang-format off
    result = __builtin_shufflevector(
        a, b,
        at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(8), at(9), at(10),
        at(11), at(12), at(13), at(14), at(15), at(16), at(17), at(18), at(19), at(20),
        at(21), at(22), at(23), at(24), at(25), at(26), at(27), at(28), at(29), at(30),
        at(31)
    );
    // clang-format on
}

/// Transposes a square of as many rows as 16 bytes have elements: interleaving the first half of the
/// rows with the second half, log2(rows) times, is a perfect shuffle of all index bits.
template <class Bits>
[[gnu::always_inline]] inline void
transpose_square(std::byte const* from, std::size_t from_step, std::byte* to, std::size_t to_step) {
    constexpr std::size_t n = 16 / sizeof(Bits);
    std::array<Bytes16, n> rows;
    for (std::size_t i = 0; i < n; ++i) {
        rows[i] = load<Bytes16>(from + i * from_step);
    }
    for (std::size_t done = 1; done < n; done *= 2) {
        std::array<Bytes16, n> next;
        for (std::size_t i = 0; i < n / 2; ++i) {
            interleave<sizeof(Bits), false>(rows[i], rows[i + n / 2], next[2 * i]);
            interleave<sizeof(Bits), true>(rows[i], rows[i + n / 2], next[2 * i + 1]);
        }
        rows = next;
    }
    for (std::size_t i = 0; i < n; ++i) {
        store<Bytes16>(to + i * to_step, rows[i]);
    }
}

/// Two squares, one below the other, become neighbours.
template <class Bits>
JOINABLE_INLINE_AVX2 void transpose_two_squares(
    std::byte const* from, std::size_t from_step, std::byte* to, std::size_t to_step
) {
    constexpr std::size_t n = 16 / sizeof(Bits);
    std::array<Bytes32, n> rows;
    for (std::size_t i = 0; i < n; ++i) {
        auto const upper = load<Bytes16>(from + i * from_step);
        auto const lower = load<Bytes16>(from + (i + n) * from_step);
        // clang-format off
        rows[i] = __builtin_shufflevector(
            upper, lower,
            0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
            22, 23, 24, 25, 26, 27, 28, 29, 30, 31
        );
        // clang-format on
    }
    for (std::size_t done = 1; done < n; done *= 2) {
        std::array<Bytes32, n> next;
        for (std::size_t i = 0; i < n / 2; ++i) {
            interleave<sizeof(Bits), false>(rows[i], rows[i + n / 2], next[2 * i]);
            interleave<sizeof(Bits), true>(rows[i], rows[i + n / 2], next[2 * i + 1]);
        }
        rows = next;
    }
    for (std::size_t i = 0; i < n; ++i) {
        Bytes32 const row = rows[i]; // not by its address: it must stay in a register
        std::memcpy(to + i * to_step, &row, sizeof(row));
    }
}

/// What squares leave over at the edges: everything from `even_rows` and `even_columns` on.
template <class Bits>
void load_edges(
    std::byte const* from,
    std::size_t row_step,
    std::size_t rows,
    std::size_t even_rows,
    std::size_t column_step,
    std::size_t columns,
    std::size_t even_columns,
    std::byte* to,
    std::size_t to_step
) {
    for (std::size_t i = 0; i < rows; ++i) {
        for (std::size_t k = i < even_rows ? even_columns : 0; k < columns; ++k) {
            store<Bits>(
                to + k * to_step + i * sizeof(Bits),
                load<Bits>(from + i * row_step + k * column_step)
            );
        }
    }
}

/// Writes element (i, k) of the source, at `i * row_step + k * column_step` bytes, to element (k, i)
/// of the target, at `k * to_step + i * sizeof(Bits)`.
template <class Bits>
JOINABLE_LOOP void load_transposed(
    std::byte const* from,
    std::size_t row_step,
    std::size_t rows,
    std::size_t column_step,
    std::size_t columns,
    std::byte* to,
    std::size_t to_step
) {
    constexpr std::size_t n = 16 / sizeof(Bits);
    bool const dense = column_step == sizeof(Bits);
    std::size_t const even_rows = dense ? rows / n * n : 0;
    std::size_t const even_columns = dense ? columns / n * n : 0;
    for (std::size_t i = 0; i < even_rows; i += n) {
        for (std::size_t k = 0; k < even_columns; k += n) {
            transpose_square<Bits>(
                from + i * row_step + k * sizeof(Bits),
                row_step,
                to + k * to_step + i * sizeof(Bits),
                to_step
            );
        }
    }
    load_edges<Bits>(
        from, row_step, rows, even_rows, column_step, columns, even_columns, to, to_step
    );
}

/// The same, two squares at a time.
template <class Bits>
JOINABLE_LOOP_AVX2 void load_transposed_avx2(
    std::byte const* from,
    std::size_t row_step,
    std::size_t rows,
    std::size_t column_step,
    std::size_t columns,
    std::byte* to,
    std::size_t to_step
) {
    constexpr std::size_t n = 16 / sizeof(Bits);
    bool const dense = column_step == sizeof(Bits);
    std::size_t const even_rows = dense ? rows / (2 * n) * (2 * n) : 0;
    std::size_t const even_columns = dense ? columns / n * n : 0;
    for (std::size_t i = 0; i < even_rows; i += 2 * n) {
        for (std::size_t k = 0; k < even_columns; k += n) {
            transpose_two_squares<Bits>(
                from + i * row_step + k * sizeof(Bits),
                row_step,
                to + k * to_step + i * sizeof(Bits),
                to_step
            );
        }
    }
    load_edges<Bits>(
        from, row_step, rows, even_rows, column_step, columns, even_columns, to, to_step
    );
}

} // namespace joinable::inline v0::detail
