// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <vector>

#include <support/numbers.hpp>

#include <joinable/tensor/shape.hpp>

namespace joinable_tests {

/// From which strides to which a tensor is copied.
struct Layout {
    joinable::Shape extents;
    joinable::Shape from;
    joinable::Shape to;
};

/// What copies of a device have to be right for.
inline std::vector<Layout> layouts() {
    return {
        {{}, {}, {}},
        {{7}, {1}, {1}},
        {{0, 3}, {3, 1}, {3, 1}},
        {{5}, {3}, {1}},
        {{2500}, {3}, {2}},
        {{4, 6}, {6, 1}, {9, 1}},
        {{40, 60}, {60, 1}, {90, 1}},
        {{4, 6}, {1, 4}, {6, 1}},
        {{70, 60}, {1, 70}, {60, 1}},
        {{4, 6}, {0, 1}, {6, 1}}, // a row that is read again and again
        {{4, 6}, {2, 1}, {6, 1}}, // rows that overlap in the source
        {{2, 3, 4}, {12, 4, 1}, {40, 8, 1}},
        {{2, 3, 4}, {1, 2, 6}, {12, 1, 3}},
        {{2, 3, 2, 5}, {100, 25, 10, 1}, {30, 10, 5, 1}},
        {{2, 1, 3, 2, 2}, {24, 7, 8, 4, 2}, {60, 9, 20, 10, 3}},
    };
}

/// 1 to 100, again and again: what every element type holds.
inline Numbers counted(std::size_t count) {
    Numbers numbers;
    for (std::size_t i = 0; i < count; ++i) {
        numbers.push_back(static_cast<double>(i % 100 + 1));
    }
    return numbers;
}

} // namespace joinable_tests
