// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <joinable/reduction/rows.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// A register as bytes, like Bytes16. Compilers find the instruction for larger elements by the
/// bytes that move together.
using Bytes32 [[gnu::vector_size(32)]] = unsigned char;
using Bytes64 [[gnu::vector_size(64)]] = unsigned char;
using Words16 [[gnu::vector_size(16)]] = std::uint64_t;
using Words32 [[gnu::vector_size(32)]] = std::uint64_t;

/// Interleaves elements of `size` bytes from the low or high halves of two registers. Returns which
/// byte of the two, one after the other, becomes byte i. A wider register is several registers of
/// 16 bytes side by side.
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
[[gnu::always_inline]] inline void
interleave(Bytes32 const& a, Bytes32 const& b, Bytes32& result) noexcept {
    constexpr auto at = &interleaved<32, size, high>;
    // clang-format off
    result = __builtin_shufflevector(
        a, b,
        at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(8), at(9), at(10),
        at(11), at(12), at(13), at(14), at(15), at(16), at(17), at(18), at(19), at(20), at(21),
        at(22), at(23), at(24), at(25), at(26), at(27), at(28), at(29), at(30), at(31)
    );
    // clang-format on
}
template <std::size_t size, bool high>
[[gnu::always_inline]] inline void
interleave(Bytes64 const& a, Bytes64 const& b, Bytes64& result) noexcept {
    constexpr auto at = &interleaved<64, size, high>;
    // clang-format off
    result = __builtin_shufflevector(
        a, b,
        at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(8), at(9), at(10),
        at(11), at(12), at(13), at(14), at(15), at(16), at(17), at(18), at(19), at(20), at(21),
        at(22), at(23), at(24), at(25), at(26), at(27), at(28), at(29), at(30), at(31), at(32),
        at(33), at(34), at(35), at(36), at(37), at(38), at(39), at(40), at(41), at(42), at(43),
        at(44), at(45), at(46), at(47), at(48), at(49), at(50), at(51), at(52), at(53), at(54),
        at(55), at(56), at(57), at(58), at(59), at(60), at(61), at(62), at(63)
    );
    // clang-format on
}

/// Fills a register with 16 bytes from each of several places, which are `step` bytes apart.
[[gnu::always_inline]] inline void
load_pieces(std::byte const* from, std::size_t, Bytes16& result) noexcept {
    result = load<Bytes16>(from);
}
[[gnu::always_inline]] inline void
load_pieces(std::byte const* from, std::size_t step, Bytes32& result) noexcept {
    auto const low = load<Words16>(from);
    auto const high = load<Words16>(from + step);
    result = reinterpret_cast<Bytes32>(__builtin_shufflevector(low, high, 0, 1, 2, 3));
}
[[gnu::always_inline]] inline void
load_pieces(std::byte const* from, std::size_t step, Bytes64& result) noexcept {
    Bytes32 low;
    Bytes32 high;
    load_pieces(from, step, low);
    load_pieces(from + 2 * step, step, high);
    result = reinterpret_cast<Bytes64>(__builtin_shufflevector(
        reinterpret_cast<Words32>(low), reinterpret_cast<Words32>(high), 0, 1, 2, 3, 4, 5, 6, 7
    ));
}

/// Transposes squares. Each has as many rows as 16 bytes have elements. The squares below the first
/// one become its neighbours, as many as fill a register. Interleaving the first half of the rows
/// with the second half, log2(rows) times, is a perfect shuffle of all index bits.
template <class Bits, class Register, bool streams>
[[gnu::always_inline]] inline void transpose_squares(
    std::byte const* from, std::size_t from_step, std::byte* to, std::size_t to_step
) {
    constexpr std::size_t n = 16 / sizeof(Bits);
    std::array<Register, n> rows;
    JOINABLE_UNROLL
    for (Register& row : rows) {
        load_pieces(from, n * from_step, row);
        from += from_step;
        asm("" : "+r"(from)); // else compilers keep the addresses of all rows, on the stack
    }
    JOINABLE_UNROLL
    for (std::size_t done = 1; done < n; done *= 2) {
        std::array<Register, n> next;
        JOINABLE_UNROLL
        for (std::size_t i = 0; i < n / 2; ++i) {
            interleave<sizeof(Bits), false>(rows[i], rows[i + n / 2], next[2 * i]);
            interleave<sizeof(Bits), true>(rows[i], rows[i + n / 2], next[2 * i + 1]);
        }
        rows = next;
    }
    JOINABLE_UNROLL
    for (std::size_t i = 0; i < n; ++i) {
        Register const row = rows[i]; // no reference: it must stay in a register
        if constexpr (streams) {
            stream(to, row);
        } else {
            std::memcpy(to, &row, sizeof(row));
        }
        to += to_step;
        asm("" : "+r"(to));
    }
}

/// A plane: element (i, k) is read at `from + i * row_step + k * column_step` bytes and written to
/// `to + k * to_step + i * sizeof(Bits)`.
struct Plane {
    std::byte const* from;
    std::size_t row_step;
    std::size_t rows;
    std::size_t column_step;
    std::size_t columns;
    std::byte* to;
    std::size_t to_step;
};

/// Prefetches the memory of a plane that will be read soon. Inlined, because GCC drops calls of a
/// function that does nothing else.
[[gnu::always_inline]] inline void prefetch(Plane const& plane) noexcept {
    for (std::size_t i = 0; i < plane.rows; ++i) {
        for (std::size_t at = 0; at < plane.columns * plane.column_step; at += 64) {
            __builtin_prefetch(plane.from + i * plane.row_step + at);
        }
    }
}

/// Transposes the rows from `done` on that whole squares cover. Returns the number of rows done so
/// far.
template <class Bits, class Register, bool streams = false>
[[gnu::always_inline]] inline std::size_t transpose_rows(Plane const plane, std::size_t done) {
    constexpr std::size_t n = 16 / sizeof(Bits);
    constexpr std::size_t height = sizeof(Register) / sizeof(Bits);
    for (; done + height <= plane.rows; done += height) {
        for (std::size_t k = 0; k + n <= plane.columns; k += n) {
            transpose_squares<Bits, Register, streams>(
                plane.from + done * plane.row_step + k * sizeof(Bits),
                plane.row_step,
                plane.to + k * plane.to_step + done * sizeof(Bits),
                plane.to_step
            );
        }
    }
    return done;
}

/// Transposes a plane, with the widest registers first.
template <class Bits, class Register, bool streams = false>
[[gnu::always_inline]] inline void transpose_plane(Plane const plane) {
    std::size_t even_rows = 0;
    std::size_t even_columns = 0;
    if (plane.column_step == sizeof(Bits)) {
        even_rows = transpose_rows<Bits, Register, streams>(plane, 0);
        even_rows = transpose_rows<Bits, Bytes16>(plane, even_rows);
        even_columns = plane.columns * sizeof(Bits) / 16 * 16 / sizeof(Bits);
    }
    std::size_t const first = even_columns == plane.columns ? even_rows : 0;
    for (std::size_t i = first; i < plane.rows; ++i) {
        for (std::size_t k = i < even_rows ? even_columns : 0; k < plane.columns; ++k) {
            store<Bits>(
                plane.to + k * plane.to_step + i * sizeof(Bits),
                load<Bits>(plane.from + i * plane.row_step + k * plane.column_step)
            );
        }
    }
}

/// With `streams`, each row of the target starts at a multiple of 64 bytes.
template <class Bits, bool streams>
struct TransposeLoop {
    template <std::size_t width>
    [[gnu::always_inline]] static void
    run(Width<width>, std::size_t /*done*/, Plane const& plane) noexcept {
        using Register = std::
            conditional_t<width == 16, Bytes16, std::conditional_t<width == 32, Bytes32, Bytes64>>;
        transpose_plane<Bits, Register, streams>(plane);
        if constexpr (streams) {
            finish_streams();
        }
    }
    [[gnu::always_inline]] static std::size_t convert(Plane const&) noexcept { return 0; }
};
template <class Bits, bool streams = false>
using TransposeLoops = CompiledLoop<TransposeLoop<Bits, streams>, Plane>;

}}} // namespace joinable::v0::detail
