// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

namespace joinable_tests {

/// `count` elements, of which element(i) makes the first `period`, and the others repeat them. What a large
/// message should hold costs no call per element, which without optimisation takes longer than the message.
template <class T, class Element>
[[nodiscard]] std::vector<T>
repeating(std::size_t period, std::size_t count, Element const& element) {
    std::vector<T> elements(count);
    for (std::size_t i = 0; i < (std::min)(period, count); ++i) {
        elements[i] = element(i);
    }
    for (std::size_t done = period; done < count; done *= 2) { // always a multiple of the period
        std::copy_n(
            elements.begin(),
            (std::min)(done, count - done),
            elements.begin() + static_cast<std::ptrdiff_t>(done)
        );
    }
    return elements;
}

/// Unlike ==, no loop over floats.
template <class T>
[[nodiscard]] bool same_bits(T const* a, T const* b, std::size_t count) {
    return count == 0 || std::memcmp(a, b, count * sizeof(T)) == 0;
}

} // namespace joinable_tests
