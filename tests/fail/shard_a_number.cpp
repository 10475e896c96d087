// SPDX-License-Identifier: BSL-1.0
// EXPECT: shard: expected a range of inputs; for a number of inputs give std::views::iota(0, inputs)
#include <joinable/join.hpp>

int main() {
    for (int const input : joinable::shard(5, {0, 2})) {
        (void)input;
    }
}
