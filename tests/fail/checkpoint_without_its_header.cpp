// SPDX-License-Identifier: BSL-1.0
// EXPECT: Checkpoint: include <joinable/checkpoint.hpp>, and give a sharded optimizer, or participants(ddp) or participants(ddp, zero), a file and options, as in Checkpoint save{zero, file, {.every = 100}}
#include <joinable/zero.hpp>

#include <vector>

struct Weights {
    std::vector<float> value, grad;
};
int main() {
    joinable::SelfCommunicator comm;
    std::vector<Weights> model(2);
    joinable::ZeroRedundancyOptimizer zero{comm, model, joinable::AdamW{}};
    joinable::Checkpoint save{zero, "model.safetensors", {.every = 100}};
}
