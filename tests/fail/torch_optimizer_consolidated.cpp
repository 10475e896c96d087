// SPDX-License-Identifier: BSL-1.0
// EXPECT: sharded optimizer: a Checkpoint has the state of this engine's optimizer; write and read it by Checkpoint
#include <vector>

#include <joinable/communicator/self.hpp>
#include <joinable/interop/torch_optimizer.hpp>
#include <torch/nn/modules/linear.h>

void train(joinable::SelfCommunicator& comm, torch::nn::Linear& model) {
    joinable::torch::Optimizer zero{
        comm,
        joinable::torch::parameters(model),
        [](std::vector<at::Tensor> mine) { return torch::optim::SGD{mine, 0.1}; }
    };
    zero.consolidate();
}
