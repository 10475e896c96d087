// SPDX-License-Identifier: BSL-1.0
// EXPECT: Communicator: expected a member 'Work all_reduce(Buffer, ReduceOp)' (in place)
#include <joinable/join.hpp>

#include <support/misuse.hpp>

struct Deaf { // without all_reduce
    int rank() const { return 0; }
    int size() const { return 1; }
    joinable::CompletedWork broadcast(joinable::Buffer, int) { return {}; }
    void barrier() {}
};
struct Weights {
    std::vector<float> value, grad;
};
int main() {
    Deaf comm;
    std::vector<Weights> model(2);
    joinable::DistributedDataParallel ddp{comm, model};
}
