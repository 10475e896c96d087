// SPDX-License-Identifier: BSL-1.0
// EXPECT: Action: expected a communicator and two functions, as in Action log{comm, act, shadow}
#include <joinable/join.hpp>

#include <support/misuse.hpp>

int main() {
    joinable::Action log{[] {}, [] {}};
}
