// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include <over_ranks.hpp>
#include <support/numbers.hpp>

#include <joinable/tensor/dtype.hpp>

namespace joinable_tests {

/// Whether these values are the expected ones: to the bit where all collectives sum in one order, else to
/// rounding, by which an element of 16 bits may change its last place.
[[nodiscard]] inline bool are_alike(
    std::vector<Numbers> const& values,
    std::vector<Numbers> const& expected,
    joinable::DType dtype = joinable::DType::f32
) {
    if (sums_have_one_order) {
        return values == expected;
    }
    double const tolerance = joinable::size_of(dtype) == 2 ? 1.0 / 128 : 1e-6;
    auto const is_near = [&](double a, double b) {
        return std::abs(a - b) <= tolerance * std::max(1.0, std::abs(b));
    };
    return std::equal(
        values.begin(),
        values.end(),
        expected.begin(),
        expected.end(),
        [&](Numbers const& a, Numbers const& b) {
            return std::equal(a.begin(), a.end(), b.begin(), b.end(), is_near);
        }
    );
}

} // namespace joinable_tests
