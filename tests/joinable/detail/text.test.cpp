// SPDX-License-Identifier: BSL-1.0
#include <joinable/detail/text.hpp>

#include <clocale>
#include <cstdlib>
#include <initializer_list>
#include <limits>
#include <string>

#include <doctest/doctest.h>
#include <support/folder.hpp>

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

/// Numbers with a decimal comma from here on. False if no such locale is installed or can be made.
bool set_decimal_comma(std::string const& folder) {
    std::string const make =
        "localedef -i de_DE -f UTF-8 " + folder + "/de_DE.UTF-8 >/dev/null 2>&1";
    if (std::system(make.c_str()) == 0) {
        setenv("LOCPATH", folder.c_str(), 1);
    }
    for (char const* const name : {"de_DE.UTF-8", "de_DE.utf8", "fr_FR.utf8", "it_IT.utf8"}) {
        if (std::setlocale(LC_NUMERIC, name) != nullptr &&
            *std::localeconv()->decimal_point == ',') {
            return true;
        }
    }
    return false;
}

TEST_CASE("numbers in texts and pictures have a point, whatever the locale") {
    check_numbers();
    joinable_tests::Folder const folder;
    if (set_decimal_comma(folder.file(""))) {
        check_numbers();
    } else {
        MESSAGE("skipped: no locale with a decimal comma is installed, and localedef makes none");
    }
    std::setlocale(LC_NUMERIC, "C");
    unsetenv("LOCPATH");
}

} // namespace
