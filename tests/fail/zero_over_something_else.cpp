// SPDX-License-Identifier: BSL-1.0
// EXPECT: Communicator: expected a member 'Work all_reduce(Buffer, ReduceOp)' (in place)
#include <joinable/zero.hpp>

#include <vector>

#include <support/misuse.hpp>

struct Weight {
    std::vector<float> value, grad;
};

int main() {
    Deaf comm;
    std::vector<Weight> weights(1);
    joinable::ZeroRedundancyOptimizer zero{comm, weights, joinable::Adam{}};
}
