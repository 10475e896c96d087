// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <string_view>

namespace joinable { inline namespace v0 { namespace detail {

/// The name of a type as the compiler prints it. It differs between compilers, so use it only in
/// error texts.
template <class T>
[[nodiscard]] consteval std::string_view type_name() noexcept {
    std::string_view const text = __PRETTY_FUNCTION__;
    std::string_view const marker = "T = ";
    auto const begin = text.find(marker);
    if (begin == std::string_view::npos) {
        return text;
    }
    std::string_view const rest = text.substr(begin + marker.size());
    return rest.substr(0, rest.find_first_of(";]"));
}

/// The declared name of a class, without namespaces and template arguments, which compilers print
/// differently. Computed by the compiler: each round of a guard asks for a participant's name.
template <class T>
[[nodiscard]] consteval std::string_view class_name() noexcept {
    std::string_view name = type_name<T>();
    if (name.ends_with('>')) {
        std::size_t depth = 0;
        std::size_t at = name.size();
        do {
            --at;
            depth += name[at] == '>' ? 1U : 0U;
            depth -= name[at] == '<' ? 1U : 0U;
        } while (depth != 0 && at != 0);
        name = name.substr(0, at);
    }
    auto const before = name.find_last_of(": >)");
    return before == std::string_view::npos ? name : name.substr(before + 1);
}

}}} // namespace joinable::v0::detail
