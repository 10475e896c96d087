// SPDX-License-Identifier: BSL-1.0
// EXPECT: torch::Optimizer: LBFGS finds one direction for all parameters from all gradients, so no rank can step a part of them; give a factory of SGD, Adam, AdamW, RMSprop or Adagrad
#include <utility>
#include <vector>

#include <joinable/communicator/self.hpp>
#include <joinable/interop/torch_sharded.hpp>
#include <torch/nn/modules/linear.h>

void train(joinable::SelfCommunicator& comm, torch::nn::Linear& model) {
    joinable::torch::ShardedDataParallel sharded{comm, model, [](std::vector<at::Tensor> mine) {
                                                     return torch::optim::LBFGS{std::move(mine)};
                                                 }};
}
