// SPDX-License-Identifier: BSL-1.0
// EXPECT: torch::Optimizer: after the parameters comes a factory, which takes a std::vector<torch::Tensor> and returns an SGD, Adam, AdamW, RMSprop or Adagrad of libtorch, or another optimizer with joinable::torch::optimizer_traits
#include <vector>

#include <joinable/communicator/self.hpp>
#include <joinable/interop/torch_optimizer.hpp>

void train(
    joinable::SelfCommunicator& comm,
    std::vector<at::Tensor> const& parameters,
    torch::optim::SGD& sgd
) {
    joinable::torch::Optimizer zero{comm, parameters, &sgd};
}
