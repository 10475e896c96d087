// SPDX-License-Identifier: BSL-1.0
// EXPECT: torch::Optimizer: LBFGS finds one direction for all parameters from all gradients, so no rank can step a part of them; give a factory of SGD, Adam, AdamW, RMSprop or Adagrad
#include <utility>
#include <vector>

#include <joinable/communicator/self.hpp>
#include <joinable/interop/torch_optimizer.hpp>

void train(joinable::SelfCommunicator& comm, std::vector<at::Tensor> const& parameters) {
    joinable::torch::Optimizer zero{comm, parameters, [](std::vector<at::Tensor> mine) {
                                        return torch::optim::LBFGS{std::move(mine)};
                                    }};
}
