// SPDX-License-Identifier: BSL-1.0
// EXPECT: Checkpoint: participants(...) are a DistributedDataParallel, a sharded optimizer, or one of each; the others of a guard have nothing to save
#include <joinable/zero.hpp>

#include <joinable/checkpoint.hpp>

#include <vector>

struct Weight {
    std::vector<float> value, grad;
};

int main() {
    joinable::SelfCommunicator comm;
    std::vector<Weight> weights(1);
    joinable::DistributedDataParallel ddp{comm, weights};
    joinable::Step step{comm, [] {}};
    joinable::Checkpoint save{joinable::participants(ddp, step), "model.safetensors"};
}
