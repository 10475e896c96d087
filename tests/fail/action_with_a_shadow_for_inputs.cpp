// SPDX-License-Identifier: BSL-1.0
// EXPECT: Action: the shadow, which is the last argument, is a function that takes nothing or the Round
#include <joinable/join.hpp>

int main() {
    joinable::SelfCommunicator comm;
    joinable::Action action{comm, [](float) {}, [](float) {}};
}
