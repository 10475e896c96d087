// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/device/squares.hpp>

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

JOINABLE_DEFINITION double sum_of_squares(AnyView const& tensor) {
    IndexOrder const order{tensor.extents(), tensor.strides()};
    double result = 0;
    visit_floating(tensor.dtype(), [&]<class T>(std::type_identity<T>) {
        auto const* const first = static_cast<T const*>(tensor.data());
        result = combine_terms<AddNumbers>(first, tensor.numel(), order, [](auto number) {
            return square_of(number);
        });
    });
    return result;
}

}}} // namespace joinable::v0::detail
