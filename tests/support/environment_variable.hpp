// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdlib>

#include <doctest/doctest.h>

namespace joinable_tests {

/// Sets a variable that was not set, until its scope ends. No other thread may read variables when it
/// begins or ends.
class EnvironmentVariable {
public:
    EnvironmentVariable(char const* name, char const* value) : name_{name} {
        REQUIRE(::setenv(name, value, 1) == 0);
    }
    EnvironmentVariable(EnvironmentVariable const&) = delete;
    EnvironmentVariable& operator=(EnvironmentVariable const&) = delete;
    ~EnvironmentVariable() { ::unsetenv(name_); }

private:
    char const* name_;
};

} // namespace joinable_tests
