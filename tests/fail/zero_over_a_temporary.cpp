// SPDX-License-Identifier: BSL-1.0
// EXPECT: ZeroRedundancyOptimizer: expected a communicator, parameters, the optimizer as in Adam{...}, then options in braces with the names and the order of ZeroOptions; write ZeroOptions{...} to be told which name is wrong
#include <joinable/zero.hpp>

#include <vector>

struct Weight {
    std::vector<float> value, grad;
};

int main() {
    std::vector<Weight> weights(1);
    joinable::ZeroRedundancyOptimizer zero{joinable::SelfCommunicator{}, weights, joinable::Adam{}};
}
