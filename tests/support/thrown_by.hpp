// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <stdexcept>
#include <string>

#include <doctest/doctest.h>

namespace joinable_tests {

/// The Error that `call()` throws. What else it throws leaves the test, and so does its throwing nothing.
template <class Error, class Call>
[[nodiscard]] Error thrown_by(Call const& call) {
    try {
        call();
    } catch (Error const& error) {
        return error;
    }
    throw std::logic_error{"expected an error, but nothing was thrown"};
}

/// Checks that `call()` throws an Error that names these ranks, with this text.
template <class Error, class Ranks, class Call>
void check_thrown(Ranks const& ranks, std::string const& text, Call const& call) {
    auto const error = thrown_by<Error>(call);
    CHECK(error.ranks() == ranks);
    CHECK(std::string{error.what()} == text);
}

} // namespace joinable_tests
