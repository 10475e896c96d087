// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <clocale>
#include <cstdlib>
#include <string>

#include <doctest/doctest.h>

#include <support/folder.hpp>

namespace joinable_tests {

/// While it lives, the program's locale writes numbers with a decimal comma, if is_set(). Otherwise no such
/// locale is installed, and localedef makes none.
class DecimalComma {
public:
    DecimalComma() {
        std::string const make =
            "localedef -i de_DE -f UTF-8 " + folder_.file("de_DE.UTF-8") + " >/dev/null 2>&1";
        if (std::system(make.c_str()) == 0) {
            setenv("LOCPATH", folder_.file("").c_str(), 1);
        }
        for (char const* const name : {"de_DE.UTF-8", "de_DE.utf8", "fr_FR.utf8", "it_IT.utf8"}) {
            is_set_ = is_set_ || (std::setlocale(LC_NUMERIC, name) != nullptr &&
                                  *std::localeconv()->decimal_point == ',');
        }
        if (!is_set_) {
            MESSAGE("skipped: no locale with a decimal comma is installed, and localedef makes none"
            );
        }
    }
    DecimalComma(DecimalComma const&) = delete;
    DecimalComma& operator=(DecimalComma const&) = delete;
    ~DecimalComma() {
        std::setlocale(LC_NUMERIC, "C");
        unsetenv("LOCPATH");
    }

    [[nodiscard]] bool is_set() const noexcept { return is_set_; }

private:
    Folder folder_;
    bool is_set_ = false;
};

} // namespace joinable_tests
