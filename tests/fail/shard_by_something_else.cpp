// SPDX-License-Identifier: BSL-1.0
// EXPECT: shard_by_weight: the weight of an element must be an integer or a floating-point number
#include <joinable/join.hpp>

#include <string>

int main() {
    std::vector<std::string> const names{"a", "b"};
    (void)joinable::shard_by_weight(names, {0, 2}, [](std::string const& name) { return name; });
}
