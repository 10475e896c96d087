// SPDX-License-Identifier: BSL-1.0
// EXPECT: torch::ShardedDataParallel: expected a communicator, a variable that is a module, a holder or a pointer, not a temporary such as std::make_shared<Net>(), the optimizer as in Adam{...} or a factory, then options in braces with the names and the order of ShardedOptions; write ShardedOptions{...} to be told which name is wrong
#include <joinable/communicator/self.hpp>
#include <joinable/interop/torch_sharded.hpp>
#include <torch/nn/modules/linear.h>

void train(joinable::SelfCommunicator& comm, torch::nn::Linear& model) {
    joinable::torch::ShardedDataParallel sharded{
        comm, model, joinable::Adam{}, {.bucket_cap_byte = 1024}
    };
}
