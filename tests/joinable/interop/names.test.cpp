// SPDX-License-Identifier: BSL-1.0
#include <joinable/interop/detail/names.hpp>

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>

namespace {

using joinable::detail::edits_between;
using joinable::detail::is_named;
using joinable::detail::near_names;

/// By its definition: a star takes no letter, or one and stays.
bool is_named_slowly(std::string_view name, std::string_view pattern) {
    if (pattern.empty()) {
        return name.empty();
    }
    if (pattern[0] == '*') {
        return is_named_slowly(name, pattern.substr(1)) ||
               (!name.empty() && is_named_slowly(name.substr(1), pattern));
    }
    return !name.empty() && name[0] == pattern[0] &&
           is_named_slowly(name.substr(1), pattern.substr(1));
}

/// All texts of these letters that are at most so long.
std::vector<std::string> texts_of(std::string_view letters, std::size_t length) {
    std::vector<std::string> texts{""};
    for (std::size_t first = 0, l = 0; l < length; ++l) {
        std::size_t const end = texts.size();
        for (; first < end; ++first) {
            for (char const letter : letters) {
                texts.push_back(texts[first] + letter);
            }
        }
    }
    return texts;
}

TEST_CASE("a star of a pattern stands for any letters or none") {
    for (std::string const& pattern : texts_of("ab*", 5)) {
        for (std::string const& name : texts_of("ab", 5)) {
            CAPTURE(pattern);
            CAPTURE(name);
            CHECK(is_named(name, pattern) == is_named_slowly(name, pattern));
        }
    }
    CHECK(is_named("layers.10.weight", "layers.*.weight"));
    CHECK(!is_named("layers.10.bias", "layers.*.weight"));
    CHECK(is_named("b", std::vector<std::string>{"a", "b"}));
    CHECK(!is_named("b", std::vector<std::string>{}));
}

TEST_CASE("names are listed by the letters in which they differ") {
    CHECK(edits_between("kitten", "sitting") == 3);
    CHECK(edits_between("", "abc") == 3);
    CHECK(edits_between("abc", "") == 3);
    CHECK(edits_between("head.wieght", "head.weight") == 2);
    CHECK(
        near_names("head.wieght", {"body.bias", "head.bias", "body.weight", "head.weight"}) ==
        R"("head.weight", "head.bias", "body.weight")"
    );
    CHECK(near_names("a", {"b"}) == R"("b")");
    CHECK(near_names("a", {}).empty());
}

} // namespace
