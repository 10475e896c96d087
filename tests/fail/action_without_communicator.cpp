// SPDX-License-Identifier: BSL-1.0
// EXPECT: Action: the communicator comes first, as in Action log{comm, act, shadow}
#include <joinable/join.hpp>

#include <support/misuse.hpp>

int main() {
    joinable::Action log{[] {}, [] {}};
}
