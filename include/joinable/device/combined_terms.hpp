// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <joinable/config.hpp>
#include <joinable/tensor/shape.hpp>

namespace joinable { inline namespace v0 { namespace detail {

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

/// Numbers that are combined in lanes.
template <class Combine>
struct CombinedLanes {
    std::array<double, square_lanes> numbers{};

    [[nodiscard]] double total() noexcept {
        for (std::size_t half = square_lanes / 2; half != 0; half /= 2) {
            for (std::size_t lane = 0; lane < half; ++lane) {
                fold_lane(numbers.data(), half, lane, Combine{});
            }
        }
        return numbers.front();
    }
};

/// Combines term(element) for all elements, in the order above.
template <class Combine, class T, class Term>
[[nodiscard]] double
combine_terms(T const* first, std::size_t count, IndexOrder const& order, Term const& term) {
    using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
    Combine const combine{};
    CombinedLanes<Combine> all;
    CombinedLanes<Combine> block;
    std::size_t blocks = 0;
    auto const close = [&] {
        double& lane = all.numbers[blocks++ % square_lanes];
        lane = combine(lane, block.total());
        block = {};
    };
    auto const [run, step] = order.level[0];
    std::size_t done = 0;
    for (std::size_t begin = 0; begin < count; begin += run) {
        T const* from = first + order.place_of(begin);
        for (std::size_t left = run; left != 0;) {
            std::size_t const lane = done % square_lanes;
            std::size_t const some = (std::min)(left, square_lanes - lane);
            for (std::size_t i = 0; i < some; ++i) {
                double& number = block.numbers[lane + i];
                number = combine(number, term(static_cast<Wide>(from[i * step])));
            }
            from += some * step;
            left -= some;
            done += some;
            if (done % square_block == 0) {
                close();
            }
        }
    }
    if (done % square_block != 0) {
        close();
    }
    return all.total();
}

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/device/impl/combined_terms.ipp>
#endif
