// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include <joinable/config.hpp>
#include <joinable/detail/hash.hpp>
#include <joinable/device/combined_terms.hpp>
#include <joinable/tensor/dtype.hpp>

/// @file
/// The steps of reductions that compute in the memory of a device. A matrix of rows x columns numbers is the product of
/// two thin ones: left (rank x rows) and right (rank x columns), each with one row of numbers for each rank of the
/// approximation. What all ranks compute from the same numbers has one order and rounds each product, so it has the same
/// bits on every processor and on every device.

namespace joinable { inline namespace v0 { namespace detail {

struct MatrixSize {
    std::size_t rows = 0;
    std::size_t columns = 0;
    std::size_t rank = 0; ///< of the approximation; 0: there is none
};

/// Elements `from` are of DeviceStep::from_dtype, and `to` of DeviceStep::dtype. Numbers are f64 where `dtype` is, else f32.
enum class StepKind : std::uint8_t {
    fill_random, ///< numbers to, from -1 to 1, follow from `seed` alone
    cast, ///< elements to = elements from x number, in the wider type; one without `from`: number
    orthogonalize,   ///< `rank` rows of `columns` numbers to, see orthogonalize()
    add,             ///< numbers to = elements from + numbers left
    multiply_right,  ///< numbers to (left) = numbers from (matrix) x right, in each device's order
    multiply_left,   ///< numbers to (right) = transposed numbers from (matrix) x left, alike
    multiply,        ///< elements to = left x right; zeros if only_if says no
    note_not_finite, ///< number of f64 to = 0 if elements from are not all finite
    keep_rows,       ///< `rank` rows of `columns` numbers to = from, but for rows of zeros
    subtract,        ///< numbers to = from - left x right
};
inline constexpr std::uint8_t step_kinds = 10;

/// The arguments of a step. Pointers are to memory of the device.
struct DeviceStep {
    StepKind kind;
    DType dtype;
    DType from_dtype = DType::f32;
    void const* from = nullptr;
    void* to = nullptr;
    void const* left = nullptr;
    void const* right = nullptr;
    double const* only_if =
        nullptr; ///< null, or a number; 0: keep_rows and subtract change nothing
    /// For multiply_left on a device: numbers_of_chunks() numbers. For multiply and subtract on the host: a row of numbers.
    void* room = nullptr;
    double number = 1; ///< a factor, or an epsilon
    std::uint64_t seed = 0;
    MatrixSize size = {};
    std::size_t count = 0; ///< of elements
};

/// On a device, multiply_left sums chunks of so many rows, and then the sums of chunks.
inline constexpr std::size_t rows_of_chunk = 256;
[[nodiscard]] JOINABLE_HOST_DEVICE constexpr std::size_t chunks_of(MatrixSize const& size
) noexcept {
    return (size.rows + rows_of_chunk - 1) / rows_of_chunk;
}
[[nodiscard]] constexpr std::size_t numbers_of_chunks(MatrixSize const& size) noexcept {
    return chunks_of(size) * size.rank * size.columns;
}

/// Number `i` that fill_random() writes.
template <class T>
[[nodiscard]] JOINABLE_HOST_DEVICE T random_number(std::uint64_t seed, std::size_t i) noexcept {
    std::uint64_t const state = seed + (i + 1) * splitmix_increment;
    return static_cast<T>(static_cast<double>(splitmix(state) >> 11U) * 0x1p-52 - 1.0);
}

/// A product in double: that of two floats is exact, so it need not be kept from being fused.
JOINABLE_HOST_DEVICE inline double wide_product(float a, float b) {
    return static_cast<double>(a) * static_cast<double>(b);
}
JOINABLE_HOST_DEVICE inline double wide_product(double a, double b) {
    double product;
    JOINABLE_ROUNDED_PRODUCT(product, a, b);
    return product;
}

// A block computes with as many threads as there are lanes. `block.each(count, f)` calls f(i) for all i, in the thread of
// lane i % square_lanes; `block.sum(count, term)` adds term(i) in double: a lane adds its terms in order, and then lanes are
// folded as in device/combined_terms.hpp.

/// The one of the host; of kernels, when the host tests them.
struct HostBlock {
    template <class F>
    JOINABLE_HOST_DEVICE void each(std::size_t count, F const& f) const {
        for (std::size_t i = 0; i < count; ++i) {
            f(i);
        }
    }
    template <class Term>
    JOINABLE_HOST_DEVICE double sum(std::size_t count, Term const& term) const {
        double lanes[square_lanes] = {};
        std::size_t done = 0;
        for (; done + square_lanes <= count; done += square_lanes) {
            for (std::size_t lane = 0; lane < square_lanes; ++lane) {
                lanes[lane] += term(done + lane);
            }
        }
        for (std::size_t i = done; i < count; ++i) {
            lanes[i - done] += term(i);
        }
        for (std::size_t half = square_lanes / 2; half != 0; half /= 2) {
            for (std::size_t lane = 0; lane < half; ++lane) {
                fold_lane(lanes, half, lane);
            }
        }
        return lanes[0];
    }
};

template <class Block, class T>
[[nodiscard]] JOINABLE_HOST_DEVICE double
inner_product(Block const& block, T const* a, T const* b, std::size_t count) {
    return block.sum(count, [=](std::size_t i) { return wide_product(a[i], b[i]); });
}

/// Makes `rank` rows of `count` numbers orthonormal, in order, as PyTorch's _orthogonalize does with an epsilon. Where the
/// rows before span a row, rounding errors are left of it, which need not be orthogonal: so each row is made so twice. Zeros
/// stay zeros.
/// Source: Giraud, Langou and Rozloznik, "The Loss of Orthogonality in the Gram-Schmidt Orthogonalization Process", 2005.
template <class Block, class T>
JOINABLE_HOST_DEVICE void
orthogonalize(Block const& block, T* rows, std::size_t rank, std::size_t count, double epsilon) {
    for (std::size_t r = 0; r < rank; ++r) {
        T* const row = rows + r * count;
        for (int pass = 0; pass < (r == 0 ? 1 : 2); ++pass) {
            for (std::size_t other = 0; other < r; ++other) {
                T const* const before = rows + other * count;
                // With an epsilon a row is shorter than 1, so its part is taken by its own length.
                double const squared = inner_product(block, before, before, count);
                double const part =
                    squared > 0 ? inner_product(block, before, row, count) / squared : 0;
                block.each(count, [=](std::size_t i) {
                    double product;
                    JOINABLE_ROUNDED_PRODUCT(product, static_cast<double>(before[i]), part);
                    row[i] = static_cast<T>(static_cast<double>(row[i]) - product);
                });
            }
            double const length = std::sqrt(inner_product(block, row, row, count)) + epsilon;
            if (length > 0) {
                block.each(count, [=](std::size_t i) {
                    row[i] = static_cast<T>(static_cast<double>(row[i]) / length);
                });
            }
        }
    }
}

/// Element i x columns + j of left x right.
template <class T>
[[nodiscard]] JOINABLE_HOST_DEVICE T
product_element(MatrixSize const& size, T const* left, T const* right, std::size_t element) {
    std::size_t const i = element / size.columns;
    std::size_t const j = element % size.columns;
    T sum = 0;
    for (std::size_t r = 0; r < size.rank; ++r) {
        T product;
        JOINABLE_ROUNDED_PRODUCT(product, right[r * size.columns + j], left[r * size.rows + i]);
        sum += product;
    }
    return sum;
}

}}} // namespace joinable::v0::detail
