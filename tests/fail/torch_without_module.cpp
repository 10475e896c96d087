// SPDX-License-Identifier: BSL-1.0
// EXPECT: joinable::torch: expected a module of libtorch, a holder such as torch::nn::Sequential, or a pointer to a module
#include <joinable/communicator/self.hpp>
#include <joinable/interop/torch.hpp>
#include <torch/nn/modules/linear.h>

void train(joinable::SelfCommunicator& comm, torch::nn::Linear& model) {
    auto parameters = model->parameters();
    joinable::torch::DistributedDataParallel ddp{comm, parameters};
}
