// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>

#include <joinable/config.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/shape.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// A sum of the squares of a tensor's elements, for Device::sum_squares().
struct SquareSum {
    AnyView tensor; ///< of a floating-point dtype
    double* sum;    ///< in the memory of the tensor's device
};

// The order of a sum of squares, which is the same on every device, and so are the bits. Elements
// count in the order of their indices, the last index changes fastest, wherever they lie in memory.
// The squares of each run of `square_block` elements are summed, then the sums of the runs, both in
// the same way: number i goes to lane i % square_lanes, a lane adds its numbers in order, and the
// upper half of the lanes is added to the lower half until one lane is left.

inline constexpr std::size_t square_lanes = 256;
inline constexpr std::size_t square_block = 8 * square_lanes;

/// The number of runs.
[[nodiscard]] JOINABLE_HOST_DEVICE constexpr std::size_t square_blocks(std::size_t elements
) noexcept {
    return (elements + square_block - 1) / square_block;
}

struct AddNumbers {
    JOINABLE_HOST_DEVICE double operator()(double a, double b) const { return a + b; }
};
/// NaN if a number is NaN.
struct LargerNumber {
    JOINABLE_HOST_DEVICE double operator()(double a, double b) const {
        return a >= b || a != a ? a : b;
    }
};

/// Lane `lane` of the lower half takes its number of the upper half.
template <class Combine = AddNumbers>
JOINABLE_HOST_DEVICE void
fold_lane(double* lanes, std::size_t half, std::size_t lane, Combine combine = {}) {
    lanes[lane] = combine(lanes[lane], lanes[lane + half]);
}

/// A square has the same bits whether a compiler fuses it with the following sum or not: that of a
/// float is exact in double.
JOINABLE_HOST_DEVICE inline double square_of(float number) {
    double const wide = static_cast<double>(number);
    return wide * wide;
}
JOINABLE_HOST_DEVICE inline double square_of(double number) {
    double square;
    JOINABLE_ROUNDED_PRODUCT(square, number, number);
    return square;
}

/// Where the elements of a tensor lie, in the order of their indices. Steps are in elements.
struct IndexOrder {
    struct Level {
        std::size_t extent;
        std::size_t step;
    };

    std::uint32_t levels;         ///< at least one
    Level level[max_tensor_rank]; ///< innermost first; neighbours are merged where possible

    IndexOrder(Shape const& extents, Shape const& strides);
    IndexOrder() = default;

    [[nodiscard]] JOINABLE_HOST_DEVICE std::size_t place_of(std::size_t element) const {
        std::size_t place = 0;
        for (std::uint32_t l = 0; l + 1 < levels; ++l) {
            place += element % level[l].extent * level[l].step;
            element /= level[l].extent;
        }
        return place + element * level[levels - 1].step;
    }
};

/// The sum of `power`-th powers of magnitudes, computed in double, for a tensor in host memory; 0 for one
/// without elements. With an infinite power the largest magnitude, NaN if an element is NaN. @pre power > 0
[[nodiscard]] double sum_of_powers(AnyView const& tensor, double power);
[[nodiscard]] inline double sum_of_squares(AnyView const& tensor) {
    return sum_of_powers(tensor, 2);
}

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/device/impl/squares.ipp>
#endif
