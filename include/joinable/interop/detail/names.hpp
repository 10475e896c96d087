// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

namespace joinable { inline namespace v0 { namespace detail {

/// Whether `name` is `pattern`, in which each `*` stands for any letters or none.
[[nodiscard]] constexpr bool is_named(std::string_view name, std::string_view pattern) noexcept {
    std::size_t at = 0;                        // in the pattern
    std::size_t star = std::string_view::npos; // the last one so far
    std::size_t taken = 0;                     // letters of the name up to the end of its own
    for (std::size_t n = 0; n < name.size();) {
        if (at < pattern.size() && pattern[at] == '*') {
            star = at++;
            taken = n;
        } else if (at < pattern.size() && pattern[at] == name[n]) {
            ++at;
            ++n;
        } else if (star != std::string_view::npos) {
            at = star + 1;
            n = ++taken;
        } else {
            return false;
        }
    }
    return pattern.find_first_not_of('*', at) == std::string_view::npos;
}
[[nodiscard]] inline bool
is_named(std::string_view name, std::vector<std::string> const& patterns) noexcept {
    return std::any_of(patterns.begin(), patterns.end(), [&](std::string const& pattern) {
        return is_named(name, std::string_view{pattern});
    });
}

/// How many letters to insert, drop or replace. Complexity: the product of the lengths.
[[nodiscard]] inline std::size_t edits_between(std::string_view a, std::string_view b) {
    std::vector<std::size_t> row(b.size() + 1);
    std::iota(row.begin(), row.end(), std::size_t{0});
    for (std::size_t i = 0; i < a.size(); ++i) {
        std::size_t diagonal = row[0];
        row[0] = i + 1;
        for (std::size_t j = 0; j < b.size(); ++j) {
            std::size_t const replaced = diagonal + (a[i] == b[j] ? 0 : 1);
            diagonal = row[j + 1];
            row[j + 1] = (std::min)({replaced, row[j] + 1, diagonal + 1});
        }
    }
    return row.back();
}

/// Up to three of `names` in quotes, the nearest first.
[[nodiscard]] inline std::string
near_names(std::string_view name, std::vector<std::string> const& names) {
    std::vector<std::size_t> order(names.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::vector<std::size_t> edits(names.size());
    for (std::size_t i = 0; i < names.size(); ++i) {
        edits[i] = edits_between(name, names[i]);
    }
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
        return edits[a] != edits[b] ? edits[a] < edits[b] : a < b;
    });
    std::string text;
    for (std::size_t i = 0; i < (std::min)(order.size(), std::size_t{3}); ++i) {
        text += (text.empty() ? "\"" : ", \"") + names[order[i]] + '"';
    }
    return text;
}

}}} // namespace joinable::v0::detail
