// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <concepts>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

namespace joinable { inline namespace v0 { namespace detail {

inline std::string to_text(std::string_view piece) {
    return std::string{piece};
}

template <std::integral Number>
std::string to_text(Number number) {
    return std::to_string(number);
}

/// Six significant digits, as short as they can be: "0.5", "300", "1e-07".
inline std::string to_text(double number) {
    std::array<char, 32> text{};
    std::snprintf(text.data(), text.size(), "%g", number);
    return text.data();
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

}}} // namespace joinable::v0::detail
