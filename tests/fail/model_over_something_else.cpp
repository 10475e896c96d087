// SPDX-License-Identifier: BSL-1.0
// EXPECT: Communicator: expected a member 'Work all_reduce(Buffer, ReduceOp)' (in place)
#include <joinable/join.hpp>

#include <support/misuse.hpp>

struct Weights {
    std::vector<float> value, grad;
};
int main() {
    Deaf comm;
    std::vector<Weights> model(2);
    joinable::DistributedDataParallel ddp{comm, model};
}
