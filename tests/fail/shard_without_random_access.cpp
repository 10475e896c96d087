// SPDX-License-Identifier: BSL-1.0
// EXPECT: shard: the range must be random access and sized, also when it is const; copy it into a
// EXPECT: std::vector first
#include <joinable/join.hpp>

#include <list>

int main() {
    std::list<int> const list{1, 2, 3};
    (void)joinable::shard(list, {0, 2});
}
