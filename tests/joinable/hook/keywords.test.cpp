// SPDX-License-Identifier: BSL-1.0
#include <joinable/hook/keywords.hpp>

#include <concepts>
#include <cstddef>
#include <limits>
#include <optional>
#include <string>

#include <doctest/doctest.h>

namespace {

using joinable::arguments;
using joinable::keyword;
using joinable::keywords;

inline constexpr struct flag_t : keyword<flag_t, bool> {
    using keyword::operator=;
} flag{};
inline constexpr struct count_t : keyword<count_t, std::size_t> {
    using keyword::operator=;
} count{};
inline constexpr struct label_t : keyword<label_t, std::string> {
    using keyword::operator=;
} label{};

template <class Keyword, class Value>
concept accepts = requires(Keyword const& keyword, Value value) { keyword = value; };

static_assert(accepts<flag_t, bool>);
static_assert(!accepts<flag_t, int>); // a flag takes flags only
static_assert(accepts<count_t, int>);
static_assert(!accepts<count_t, double>); // no fraction is cut silently
static_assert(!accepts<count_t, bool>);
static_assert(accepts<label_t, char const*>);

template <class Number>
struct perhaps_t : keyword<perhaps_t<Number>, std::optional<Number>> {
    using keyword<perhaps_t<Number>, std::optional<Number>>::operator=;
};
static_assert(accepts<perhaps_t<int>, int>);
static_assert(accepts<perhaps_t<int>, std::optional<int>>);
static_assert(accepts<perhaps_t<int>, std::nullopt_t>);
static_assert(!accepts<perhaps_t<int>, double>);
static_assert(!accepts<perhaps_t<int>, std::optional<double>>);
static_assert(!accepts<perhaps_t<int>, bool>);
static_assert(accepts<perhaps_t<bool>, bool>);
static_assert(accepts<perhaps_t<bool>, std::nullopt_t>);
static_assert(!accepts<perhaps_t<bool>, int>);

TEST_CASE("a keyword that was given is read back, another one keeps its default") {
    arguments<keywords<flag_t, count_t, label_t>> args{};
    args.set(flag = true);
    args.set(label = "loss");
    CHECK(args.get(flag, false));
    CHECK(args.get(count, 7) == 7);
    CHECK(args.get(label, "") == "loss");
}

TEST_CASE("a keyword that a joinable does not accept is not stored for it") {
    arguments<keywords<count_t>> args{};
    args.set(flag = true);
    args.set(count = 3);
    CHECK(args.get(count, 0) == 3);
}

inline constexpr struct offset_t : keyword<offset_t, signed char> {
    using keyword::operator=;
} offset{};

TEST_CASE("a whole number that the keyword's type cannot hold is refused, and not changed") {
    for (long long const fits : {-128LL, -1LL, 0LL, 127LL}) {
        CHECK((offset = fits).value == fits);
    }
    for (long long const other : {-129LL, 128LL, 256LL, 257LL, 1LL << 40}) {
        CHECK_THROWS_AS(offset = other, joinable::ContractViolation);
    }
    CHECK_THROWS_AS(offset = 200U, joinable::ContractViolation);
    CHECK((count = 'a').value == 97);
    CHECK_THROWS_WITH_AS(
        count = -1,
        "a keyword whose value is a whole number without sign of 64 bits was given -1; give it a "
        "number that fits, or make its type larger",
        joinable::ContractViolation
    );
    static_assert((offset = -3).value == -3);
    enum Unscoped : int { negative = -1 };
    CHECK_THROWS_AS(count = negative, joinable::ContractViolation);
}

TEST_CASE("an optional number that the keyword's type cannot hold is refused, and not changed") {
    perhaps_t<unsigned> const perhaps{};
    CHECK((perhaps = 3).value == 3U);
    CHECK((perhaps = std::optional<int>{3}).value == 3U);
    CHECK(!(perhaps = std::nullopt).value);
    CHECK(!(perhaps = std::optional<int>{}).value);
    CHECK_THROWS_AS(perhaps = -1, joinable::ContractViolation);
    CHECK_THROWS_AS(perhaps = std::optional<int>{-1}, joinable::ContractViolation);
}

TEST_CASE("a number that becomes infinite in the keyword's type is refused") {
    perhaps_t<float> const perhaps{};
    CHECK((perhaps = 0.1).value == 0.1F);
    CHECK((perhaps = -std::numeric_limits<double>::infinity()).value < 0.0F);
    CHECK_THROWS_WITH_AS(
        perhaps = -1e300,
        "a keyword whose value is a floating-point number of 32 bits was given -1e+300; give it a number that "
        "fits, or make its type larger",
        joinable::ContractViolation
    );
}

} // namespace
