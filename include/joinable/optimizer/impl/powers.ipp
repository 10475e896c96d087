// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/optimizer/powers.hpp>

#include <cmath>
#include <cstddef>
#include <type_traits>

#include <joinable/device/combined_terms.hpp>
#include <joinable/device/squares.hpp>
#include <joinable/tensor/dtype.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION double sum_of_powers(AnyView const& tensor, double power) {
    if (power == 2) {
        return sum_of_squares(tensor);
    }
    std::size_t const count = tensor.numel();
    IndexOrder const order{tensor.extents(), tensor.strides()};
    double result = 0;
    visit_floating(tensor.dtype(), [&]<class T>(std::type_identity<T>) {
        auto const* const first = static_cast<T const*>(tensor.data());
        auto const magnitude = [](auto number) { return std::abs(static_cast<double>(number)); };
        if (std::isinf(power)) {
            result = combine_terms<LargerNumber>(first, count, order, magnitude);
        } else {
            result = combine_terms<AddNumbers>(first, count, order, [&](auto number) {
                return std::pow(magnitude(number), power);
            });
        }
    });
    return result;
}

}}} // namespace joinable::v0::detail
