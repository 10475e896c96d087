// SPDX-License-Identifier: BSL-1.0
// EXPECT: sharded optimizer: after the parameters comes the optimizer itself: an UpdateRule, with state_names() and update(range), or a LocalOptimizer, with step(parameter) and settings()
#include <joinable/zero.hpp>

#include <vector>

struct Weight {
    std::vector<float> value, grad;
};

int main() {
    joinable::SelfCommunicator comm;
    std::vector<Weight> weights(1);
    joinable::ShardedDataParallel sharded{comm, weights, "adam"};
}
