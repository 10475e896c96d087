// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/device/squares.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <type_traits>

#include <joinable/tensor/dtype.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION IndexOrder::IndexOrder(Shape const& extents, Shape const& strides)
    : levels{0}, level{} {
    for (std::size_t d = extents.size(); d-- > 0;) {
        if (extents[d] == 1) {
            continue;
        }
        if (levels != 0 && level[levels - 1].extent * level[levels - 1].step == strides[d]) {
            level[levels - 1].extent *= extents[d];
        } else {
            level[levels++] = {extents[d], strides[d]};
        }
    }
    if (levels == 0) { // a single element
        level[levels++] = {1, 1};
    }
}

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

JOINABLE_DEFINITION double sum_of_powers(AnyView const& tensor, double power) {
    std::size_t const count = tensor.numel();
    IndexOrder const order{tensor.extents(), tensor.strides()};
    double result = 0;
    visit_floating(tensor.dtype(), [&]<class T>(std::type_identity<T>) {
        auto const* const first = static_cast<T const*>(tensor.data());
        auto const magnitude = [](auto number) { return std::abs(static_cast<double>(number)); };
        if (std::isinf(power)) {
            result = combine_terms<LargerNumber>(first, count, order, magnitude);
        } else if (power == 2) {
            result = combine_terms<AddNumbers>(first, count, order, [](auto number) {
                return square_of(number);
            });
        } else {
            result = combine_terms<AddNumbers>(first, count, order, [&](auto number) {
                return std::pow(magnitude(number), power);
            });
        }
    });
    return result;
}

}}} // namespace joinable::v0::detail
