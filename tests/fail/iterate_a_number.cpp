// SPDX-License-Identifier: BSL-1.0
// EXPECT: iterate: expected a range of inputs; for a number of rounds give std::views::iota(0, rounds)
#include <joinable/join.hpp>

int main() {
    joinable::SelfCommunicator comm;
    joinable::Step step{comm, [] {}};
    joinable::Join guard{joinable::participants(step)};
    for ([[maybe_unused]] int const round : guard.iterate(5)) {
        step.step();
    }
}
