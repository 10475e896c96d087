// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <string_view>

namespace joinable::inline v0::detail {

/// The name of a type as the compiler prints it, for error texts only: it differs between
/// compilers, so nothing may depend on it.
template <class T>
[[nodiscard]] constexpr std::string_view type_name() noexcept {
    std::string_view const text = __PRETTY_FUNCTION__;
    std::string_view const marker = "T = ";
    auto const begin = text.find(marker);
    if (begin == std::string_view::npos) {
        return text;
    }
    std::string_view const rest = text.substr(begin + marker.size());
    return rest.substr(0, rest.find_first_of(";]"));
}

} // namespace joinable::inline v0::detail
