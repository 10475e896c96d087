// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <string>
#include <string_view>
#include <vector>

namespace joinable::inline v0::detail {

inline std::string to_text(std::string_view piece) {
    return std::string{piece};
}

template <class Number>
    requires std::integral<Number> || std::floating_point<Number>
std::string to_text(Number number) {
    return std::to_string(number);
}

/// "3", "3 and 5", "1, 3 and 5": how error texts list ranks and indices.
template <class Number>
std::string to_text(std::vector<Number> const& numbers) {
    std::string text;
    for (std::size_t i = 0; i < numbers.size(); ++i) {
        if (i != 0) {
            text += i + 1 == numbers.size() ? " and " : ", ";
        }
        text += to_text(numbers[i]);
    }
    return text;
}

/// Joins strings, numbers and lists of numbers into one error text.
template <class... Pieces>
std::string concat(Pieces const&... pieces) {
    std::string text;
    ((text += to_text(pieces)), ...);
    return text;
}

/// "rank 3" or "ranks 1, 3 and 5".
inline std::string ranks_text(std::vector<int> const& ranks) {
    return concat(ranks.size() == 1 ? "rank " : "ranks ", ranks);
}

} // namespace joinable::inline v0::detail
