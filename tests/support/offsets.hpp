// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <vector>

#include <joinable/tensor/shape.hpp>

namespace joinable_tests {

/// The offsets of all elements in row-major order: those of the inner dimensions, once for each index of the next one.
/// By pointers, because many tests spend their time here and are compiled without optimization.
inline std::vector<std::size_t>
offsets_of(joinable::Shape const& extents, joinable::Shape const& strides) {
    std::size_t count = 1;
    for (std::size_t d = 0; d < extents.size(); ++d) {
        count *= extents[d];
    }
    std::vector<std::size_t> offsets(count);
    std::size_t inner = 1;
    for (std::size_t d = extents.size(); d-- > 0 && count > 0;) {
        std::size_t* to = offsets.data() + inner;
        std::size_t* const end = offsets.data() + inner * extents[d];
        std::size_t const* from = offsets.data(); // an index back, along this dimension
        std::size_t const stride = strides[d];
        while (to != end) {
            *to++ = *from++ + stride;
        }
        inner *= extents[d];
    }
    return offsets;
}

} // namespace joinable_tests
