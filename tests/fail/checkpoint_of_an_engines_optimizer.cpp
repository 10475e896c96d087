// SPDX-License-Identifier: BSL-1.0
// EXPECT: Checkpoint: an engine's optimizer keeps its state itself; save and load it on the owner of each parameter, which owner_of() names
#include <joinable/zero.hpp>

#include <joinable/checkpoint.hpp>

#include <vector>

struct Weight {
    std::vector<float> value, grad;
};
struct Lamb {
    double learning_rate = 1e-3;
    double& settings() { return learning_rate; }
    void step(joinable::WholeParameter const&) {}
};

int main() {
    joinable::SelfCommunicator comm;
    std::vector<Weight> weights(1);
    joinable::ZeroRedundancyOptimizer zero{comm, weights, Lamb{}};
    joinable::Checkpoint save{zero, "model.safetensors"};
    save.write();
}
