// SPDX-License-Identifier: BSL-1.0
#include <joinable/detail/text.hpp>

#include <limits>
#include <string>
#include <string_view>

#include <doctest/doctest.h>
#include <support/decimal_comma.hpp>

namespace {

using joinable::detail::concat;
using joinable::detail::rounded_text;

void check_numbers() {
    CHECK(concat(0.5, " ", 300.0, " ", 1e-7, " ", 1234567.0) == "0.5 300 1e-07 1.23457e+06");
    CHECK(rounded_text(12.345) == "12.3");
    CHECK(rounded_text(99.94) == "99.9");
    CHECK(rounded_text(4711.5) == "4712");
    CHECK(rounded_text((std::numeric_limits<double>::max)()).size() == 309);
}

TEST_CASE("a name that is returned by value dies before its view is read") {
    using joinable::detail::lasting_text;
    CHECK(!lasting_text<std::string>);
    CHECK(lasting_text<std::string const&>);
    CHECK(lasting_text<std::string_view>);
    CHECK(lasting_text<char const*>);
    CHECK(!lasting_text<int const&>);
}

TEST_CASE("numbers in texts have a point, whatever the locale") {
    check_numbers();
    joinable_tests::DecimalComma const comma;
    if (comma.is_set()) {
        check_numbers();
    }
}

} // namespace
