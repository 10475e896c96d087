// SPDX-License-Identifier: BSL-1.0
// EXPECT: torch::DistributedDataParallel: expected a communicator, a variable that is a module, a holder or a pointer, not a temporary such as std::make_shared<Net>(), then options in braces with the names and the order of DataParallelOptions; write DataParallelOptions{...} to be told which name is wrong
#include <joinable/communicator/self.hpp>
#include <joinable/interop/torch.hpp>
#include <torch/nn/modules/linear.h>

void train(joinable::SelfCommunicator& comm, torch::nn::Linear& model) {
    joinable::torch::DistributedDataParallel ddp{comm, model, {.find_unsued = true}};
}
