// SPDX-License-Identifier: BSL-1.0
// EXPECT: ShardedDataParallel: expected a communicator, parameters, buffers(ranges...) if the model has any, the optimizer as in Adam{...}, then options in braces with the names and the order of ShardedOptions; write ShardedOptions{...} to be told which name is wrong
#include <joinable/zero.hpp>

#include <vector>

struct Weight {
    std::vector<float> value, grad;
};

int main() {
    joinable::SelfCommunicator comm;
    std::vector<Weight> weights(1);
    joinable::ShardedDataParallel sharded{comm, weights};
}
