// SPDX-License-Identifier: BSL-1.0
// EXPECT: reduce_scatter: this communicator has no member 'Work reduce_scatter(ConstBuffer in,
// EXPECT: Buffer out, ReduceOp)' without and with counts; add it, or use one that models
// EXPECT: ReduceScatters
#include <joinable/join.hpp>

#include <vector>

#include <support/misuse.hpp>

struct Core {
    int rank() const { return 0; }
    int size() const { return 1; }
    joinable::CompletedWork all_reduce(joinable::Buffer, joinable::ReduceOp) { return {}; }
    joinable::CompletedWork broadcast(joinable::Buffer, int) { return {}; }
    void barrier() {}
};
int main() {
    Core comm;
    std::vector<float> values(1);
    (void)joinable::reduce_scatter(comm, values, values);
}
