// SPDX-License-Identifier: BSL-1.0
// EXPECT: shard: the range comes first and then the communicator, as in shard(batches, comm)
#include <joinable/join.hpp>

#include <vector>

int main() {
    joinable::SelfCommunicator comm;
    std::vector<int> const batches(3);
    for (int const batch : joinable::shard(comm, batches, {.seed = 7})) {
        (void)batch;
    }
}
