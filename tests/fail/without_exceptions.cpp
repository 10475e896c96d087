// SPDX-License-Identifier: BSL-1.0
// OPTIONS: -std=c++20;-fno-exceptions
// EXPECT: joinable reports failures by exceptions: compile without -fno-exceptions
#include <joinable/join.hpp>

int main() {}
