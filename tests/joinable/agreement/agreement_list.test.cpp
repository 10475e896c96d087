// SPDX-License-Identifier: BSL-1.0
#include <joinable/agreement/agreement_list.hpp>

#include <array>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>

namespace {

using joinable::AgreementList;
using joinable::detail::is_agreeable;

enum class Color : std::uint8_t { red, green };
struct Something {};

static_assert(is_agreeable<int>());
static_assert(is_agreeable<Color>());
static_assert(is_agreeable<char const*>());
static_assert(is_agreeable<std::optional<std::vector<std::array<double, 2>>>>());
static_assert(!is_agreeable<Something>());
static_assert(!is_agreeable<int*>());
static_assert(!is_agreeable<std::vector<Something>>());
static_assert(!is_agreeable<std::optional<Something>>());
static_assert(!is_agreeable<std::map<int, int>>());
static_assert(!is_agreeable<std::filesystem::path>()); // a range of paths

template <class V>
std::string text_of(V const& value) {
    AgreementList list;
    list.add("x", value);
    return list.items()[0].value;
}

TEST_CASE("the text of a value is what a person would write") {
    CHECK(text_of(true) == "true");
    CHECK(text_of(-3) == "-3");
    CHECK(text_of(std::numeric_limits<std::uint64_t>::max()) == "18446744073709551615");
    CHECK(text_of('a') == "97");
    CHECK(text_of(Color::green) == "1");
    CHECK(text_of(0.1) == "0.1");
    CHECK(text_of(0.1F) == "0.1");
    CHECK(text_of(-0.0) == "-0");
    CHECK(text_of(std::nan("")) == "nan");
    CHECK(text_of("red") == "red");
    CHECK(text_of(std::string{"red"}) == "red");
    CHECK(text_of(std::vector<bool>{true, false}) == "[true, false]");
    CHECK(text_of(std::vector<std::string>{}) == "[]");
    CHECK(text_of(std::vector<std::vector<int>>{{1, 2}, {}}) == "[[1, 2], []]");
    CHECK(text_of(std::optional<int>{}) == "no value");
    CHECK(text_of(std::optional<int>{7}) == "7");
}

TEST_CASE("other values have other texts") {
    CHECK(text_of(0.1 + 0.2) == "0.30000000000000004");
    CHECK(text_of(std::nextafter(1.0F, 2.0F)) == "1.0000001");
    using Strings = std::vector<std::string>;
    CHECK(text_of(Strings{"a, b"}) == "[\"a, b\"]");
    CHECK(text_of(Strings{"a", "b"}) == "[\"a\", \"b\"]");
    CHECK(text_of(Strings{"a\", \"b"}) == "[\"a\\\", \\\"b\"]");
    CHECK(text_of(Strings{"\\"}) == "[\"\\\\\"]");
    CHECK(text_of(std::optional<std::string>{"no value"}) == "\"no value\"");
    CHECK(text_of(std::optional<std::string>{}) == "no value");
    using Nested = std::optional<std::optional<int>>;
    CHECK(text_of(Nested{}) == "no value");
    CHECK(text_of(Nested{std::optional<int>{}}) == "a value (no value)");
    CHECK(text_of(Nested{7}) == "a value (7)");
    using Deep = std::optional<Nested>;
    CHECK(text_of(Deep{Nested{}}) != text_of(Deep{Nested{std::optional<int>{}}}));
}

TEST_CASE("labels carry the title of their section") {
    AgreementList list;
    list.begin_section("options differ: ");
    list.add("a", 1);
    list.add("b", 2);
    list.begin_section("models differ: ");
    list.add("a", 1);
    REQUIRE(list.items().size() == 3);
    CHECK(list.items()[1].label == "options differ: b");
    CHECK(list.items()[2].label == "models differ: a");
    CHECK(list.hash(0) != list.hash(2));
}

TEST_CASE("a hash is that of label and value, and of where one ends") {
    AgreementList list;
    list.add("ab", "c");
    list.add("a", "bc");
    list.add("ab", "c");
    CHECK(list.hash(0) != list.hash(1));
    CHECK(list.hash(0) == list.hash(2));
    CHECK(list.hash(2) != 0);
    CHECK(list.hash(3) == 0);
}

TEST_CASE("the hash of all depends on each item and on their order") {
    auto const hash_of = [](std::vector<int> const& values) {
        AgreementList list;
        for (int const value : values) {
            list.add("x", value);
        }
        return list.hash_from(0);
    };
    CHECK(hash_of({}) == 0);
    CHECK(hash_of({1, 2}) == hash_of({1, 2}));
    CHECK(hash_of({1, 2}) != hash_of({2, 1}));
    CHECK(hash_of({1, 2}) != hash_of({1}));
    CHECK(hash_of({1, 2}) != hash_of({1, 3}));
    CHECK(hash_of({1, 2}) != hash_of({3, 2}));
}

} // namespace
