// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstring>

#include <joinable/config.hpp>
#include <joinable/device/step.hpp>
#include <joinable/reduction/rows.hpp>

/// @file
/// The products of device/step.hpp on the host, by its instruction sets.

namespace joinable { inline namespace v0 { namespace detail {

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

}}} // namespace joinable::v0::detail
