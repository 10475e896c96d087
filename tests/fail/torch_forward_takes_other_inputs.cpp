// SPDX-License-Identifier: BSL-1.0
// EXPECT: forward: the module's forward() does not take these inputs; a lambda can call what else the module has, as in ddp.forward([&] { return module->encode(batch); })
#include <joinable/communicator/self.hpp>
#include <joinable/interop/torch.hpp>
#include <torch/nn/modules/linear.h>

void train(joinable::SelfCommunicator& comm, torch::nn::Linear& model, at::Tensor const& batch) {
    joinable::torch::DistributedDataParallel ddp{comm, model};
    ddp.forward(batch, batch);
}
