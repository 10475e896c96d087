// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/config.hpp>
#include <joinable/tensor/any_view.hpp>

namespace joinable { inline namespace v0 { namespace detail {

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

/// The sum of the squares of all elements, computed in double, for a tensor in host memory; 0 for one
/// without elements.
[[nodiscard]] double sum_of_squares(AnyView const& tensor);

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/device/impl/squares.ipp>
#endif
