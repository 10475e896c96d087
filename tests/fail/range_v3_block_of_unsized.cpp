// SPDX-License-Identifier: BSL-1.0
// EXPECT: contiguous_shard: the range must know its size; use strided_shard, which needs none
#include <forward_list>

#include <joinable/interop/range_v3.hpp>

int main() {
    std::forward_list<int> list{0, 1, 2};
    (void)(list | joinable::views::contiguous_shard(0, 2));
}
