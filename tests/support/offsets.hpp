// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <vector>

#include <joinable/tensor/shape.hpp>

namespace joinable_tests {

/// The offsets of all elements in row-major order, by loops that count one index up at a time.
inline std::vector<std::size_t>
offsets_of(joinable::Shape const& extents, joinable::Shape const& strides) {
    std::vector<std::size_t> offsets{0};
    for (std::size_t d = 0; d < extents.size(); ++d) {
        std::vector<std::size_t> longer;
        for (std::size_t const offset : offsets) {
            for (std::size_t i = 0; i < extents[d]; ++i) {
                longer.push_back(offset + i * strides[d]);
            }
        }
        offsets = longer;
    }
    return offsets;
}

} // namespace joinable_tests
