// SPDX-License-Identifier: BSL-1.0
// EXPECT: iterate: what announces a round takes an element and returns a RoundNotice, such as
// EXPECT: [](auto const& batch) { return joinable::RoundNotice{.weight = batch.size()}; }
#include <joinable/join.hpp>

#include <support/misuse.hpp>

int main() {
    Good good;
    std::vector<std::vector<int>> const batches(3);
    joinable::Join guard{joinable::participants(good)};
    for (auto const& batch : guard.iterate(batches, [](auto& b) { return b.size(); })) {
        (void)batch;
    }
}
