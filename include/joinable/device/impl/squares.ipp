// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/device/squares.hpp>

#include <algorithm>
#include <array>
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

/// Numbers that are added in lanes.
struct SquareLanes {
    std::array<double, square_lanes> sums{};

    [[nodiscard]] double total() noexcept {
        for (std::size_t half = square_lanes / 2; half != 0; half /= 2) {
            for (std::size_t lane = 0; lane < half; ++lane) {
                fold_lane(sums.data(), half, lane);
            }
        }
        return sums.front();
    }
};

template <class T>
[[nodiscard]] double sum_of_squares_as(T const* first, std::size_t count, IndexOrder const& order) {
    using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
    SquareLanes all;
    SquareLanes block;
    std::size_t blocks = 0;
    auto const close = [&] {
        all.sums[blocks++ % square_lanes] += block.total();
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
                block.sums[lane + i] += square_of(static_cast<Wide>(from[i * step]));
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

JOINABLE_DEFINITION double sum_of_squares(AnyView const& tensor) {
    std::size_t const count = tensor.numel();
    IndexOrder const order{tensor.extents(), tensor.strides()};
    switch (tensor.dtype()) {
    case DType::f16:
        return sum_of_squares_as(static_cast<Half const*>(tensor.data()), count, order);
    case DType::bf16:
        return sum_of_squares_as(static_cast<BFloat16 const*>(tensor.data()), count, order);
    case DType::f64:
        return sum_of_squares_as(static_cast<double const*>(tensor.data()), count, order);
    default: return sum_of_squares_as(static_cast<float const*>(tensor.data()), count, order);
    }
}

}}} // namespace joinable::v0::detail
