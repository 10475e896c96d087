// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/device/squares.hpp>

#include <type_traits>

#include <joinable/device/combined_terms.hpp>
#include <joinable/tensor/dtype.hpp>

namespace joinable { inline namespace v0 { namespace detail {

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
