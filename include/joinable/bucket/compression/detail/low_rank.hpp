// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <joinable/config.hpp>
#include <joinable/detail/hash.hpp>
#include <joinable/reduction/rows.hpp>

/// @file
/// A matrix of rows x columns numbers as the product of two thin ones: left (rank x rows) and right (rank x columns), each
/// with one row of numbers for each rank of the approximation. What all ranks compute from the same numbers has one order
/// and rounds each product, so it has the same bits on every processor.

namespace joinable { inline namespace v0 { namespace detail {

struct MatrixSize {
    std::size_t rows = 0;
    std::size_t columns = 0;
    std::size_t rank = 0; ///< of the approximation; 0: there is none
};

/// left = matrix x right, on this rank.
template <class T>
JOINABLE_LOOP void
multiply_right(MatrixSize size, T const* matrix, T const* right, T* left) noexcept {
    constexpr std::size_t lanes = 64 / sizeof(T);
    for (std::size_t i = 0; i < size.rows; ++i) {
        T const* const row = matrix + i * size.columns;
        for (std::size_t r = 0; r < size.rank; ++r) {
            T const* const column = right + r * size.columns;
            T sums[lanes] = {};
            std::size_t j = 0;
            for (; j + lanes <= size.columns; j += lanes) {
                for (std::size_t lane = 0; lane < lanes; ++lane) {
                    sums[lane] += row[j + lane] * column[j + lane];
                }
            }
            T sum = 0;
            for (; j < size.columns; ++j) {
                sum += row[j] * column[j];
            }
            for (T const part : sums) {
                sum += part;
            }
            left[r * size.rows + i] = sum;
        }
    }
}

/// right = the transposed matrix x left, on this rank.
template <class T>
JOINABLE_LOOP void
multiply_left(MatrixSize size, T const* matrix, T const* left, T* right) noexcept {
    for (std::size_t k = 0; k < size.rank * size.columns; ++k) {
        right[k] = 0;
    }
    for (std::size_t i = 0; i < size.rows; ++i) {
        T const* const row = matrix + i * size.columns;
        for (std::size_t r = 0; r < size.rank; ++r) {
            T const factor = left[r * size.rows + i];
            T* const sums = right + r * size.columns;
            for (std::size_t j = 0; j < size.columns; ++j) {
                sums[j] += row[j] * factor;
            }
        }
    }
}

/// Row `i` of left x right, one row of right after another, from column `done` on.
template <class T>
struct ProductRow {
    static std::size_t convert(MatrixSize, T const*, T const*, std::size_t, T*) noexcept {
        return 0;
    }
    template <std::size_t bytes>
    [[gnu::always_inline]] static void
    run(Width<bytes>,
        std::size_t done,
        MatrixSize size,
        T const* left,
        T const* right,
        std::size_t i,
        T* to) noexcept {
        constexpr std::size_t lanes = bytes / sizeof(T);
        using Register [[gnu::vector_size(bytes)]] = T;
        auto const* const rows = reinterpret_cast<std::byte const*>(right);
        auto* const results = reinterpret_cast<std::byte*>(to);
        std::size_t j = done;
        for (; j + lanes <= size.columns; j += lanes) {
            Register sum = {};
            for (std::size_t r = 0; r < size.rank; ++r) {
                Register row; // by value it would change the ABI of a function for every processor
                std::memcpy(&row, rows + (r * size.columns + j) * sizeof(T), sizeof row);
                Register product;
                JOINABLE_ROUNDED_PRODUCT(product, row, left[r * size.rows + i]);
                sum += product;
            }
            std::memcpy(results + j * sizeof(T), &sum, sizeof sum);
        }
        for (; j < size.columns; ++j) {
            T sum = 0;
            for (std::size_t r = 0; r < size.rank; ++r) {
                T product;
                JOINABLE_ROUNDED_PRODUCT(
                    product, right[r * size.columns + j], left[r * size.rows + i]
                );
                sum += product;
            }
            store<T>(results + j * sizeof(T), sum);
        }
    }
};
template <class T>
void product_row(
    MatrixSize size,
    T const* left,
    T const* right,
    std::size_t i,
    T* to,
    InstructionSet set = instruction_set()
) noexcept {
    CompiledLoop<ProductRow<T>, MatrixSize, T const*, T const*, std::size_t, T*>::of(set)(
        size, left, right, i, to
    );
}

/// The sum of the products of two lists, one after another, in double.
template <class T>
[[nodiscard]] JOINABLE_LOOP double
inner_product(T const* a, T const* b, std::size_t count) noexcept {
    double sum = 0;
    for (std::size_t i = 0; i < count; ++i) {
        double product; // of two floats it is exact
        JOINABLE_ROUNDED_PRODUCT(product, static_cast<double>(a[i]), static_cast<double>(b[i]));
        sum += product;
    }
    return sum;
}
/// row -= part x other
template <class T>
JOINABLE_LOOP void subtract(T* row, double part, T const* other, std::size_t count) noexcept {
    for (std::size_t i = 0; i < count; ++i) {
        double product;
        JOINABLE_ROUNDED_PRODUCT(product, static_cast<double>(other[i]), part);
        row[i] = static_cast<T>(static_cast<double>(row[i]) - product);
    }
}
/// row /= its length + epsilon. Zeros stay zeros.
template <class T>
void normalize(T* row, std::size_t count, double epsilon) noexcept {
    double const length = std::sqrt(inner_product(row, row, count)) + epsilon;
    for (std::size_t i = 0; length > 0 && i < count; ++i) {
        row[i] = static_cast<T>(static_cast<double>(row[i]) / length);
    }
}

/// Makes `rank` rows of `count` numbers orthonormal, in order, as PyTorch's _orthogonalize does with an epsilon. Where the
/// rows before span a row, rounding errors are left of it, which need not be orthogonal: so each row is made so twice.
/// Source: Giraud, Langou and Rozloznik, "The Loss of Orthogonality in the Gram-Schmidt Orthogonalization Process", 2005.
template <class T>
void orthogonalize(T* rows, std::size_t rank, std::size_t count, double epsilon) noexcept {
    for (std::size_t r = 0; r < rank; ++r) {
        T* const row = rows + r * count;
        for (int pass = 0; pass < (r == 0 ? 1 : 2); ++pass) {
            for (std::size_t other = 0; other < r; ++other) {
                T const* const before = rows + other * count;
                subtract(row, inner_product(before, row, count), before, count);
            }
            normalize(row, count, epsilon);
        }
    }
}

/// Fills with numbers from -1 to 1 that follow from `seed` alone.
template <class T>
void fill_random(T* to, std::size_t count, std::uint64_t seed) noexcept {
    for (std::size_t i = 0; i < count; ++i) {
        seed += splitmix_increment;
        to[i] = static_cast<T>(static_cast<double>(splitmix(seed) >> 11U) * 0x1p-52 - 1.0);
    }
}

}}} // namespace joinable::v0::detail
