// SPDX-License-Identifier: BSL-1.0
// EXPECT: copy, scale_copy and add: source and target must have the same type of elements
#include <joinable/join.hpp>

#include <support/misuse.hpp>

int main() {
    std::vector<float> numbers(3);
    std::vector<int> counts(3);
    joinable::add(joinable::as_strided(counts, {3}, {1}), joinable::as_strided(numbers, {3}, {1}));
}
