// SPDX-License-Identifier: BSL-1.0
// EXPECT: iterate: after the range comes a function that returns the notice of an element, such as [](auto const&) { return joinable::RoundNotice{.weight = 32}; }
#include <joinable/join.hpp>

#include <vector>

int main() {
    joinable::SelfCommunicator comm;
    joinable::Step step{comm, [] {}};
    joinable::Join guard{joinable::participants(step)};
    std::vector<int> const batches(5);
    for ([[maybe_unused]] int const batch : guard.iterate(batches, {.weight = 3})) {
        step.step();
    }
}
