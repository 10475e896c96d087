// SPDX-License-Identifier: BSL-1.0
// EXPECT: all_gather: this communicator has no member 'Work all_gather(ConstBuffer in, Buffer
// EXPECT: out)' without and with counts; add it, or use one that models AllGathers
#include <joinable/join.hpp>

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
    (void)joinable::all_gather(comm, values, values);
}
