// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/device/combined_terms.hpp>

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

}}} // namespace joinable::v0::detail
