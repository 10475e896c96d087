// SPDX-License-Identifier: BSL-1.0
// OPTIONS: -std=c++17
// EXPECT: joinable needs C++20: compile with -std=c++20
#include <joinable/join.hpp>

int main() {}
