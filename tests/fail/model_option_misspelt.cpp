// SPDX-License-Identifier: BSL-1.0
// EXPECT: DistributedDataParallel: after the parameters come buffers(ranges...), if the model
// EXPECT: has any, then options in braces with the names and the order of DataParallelOptions; write
// EXPECT: DataParallelOptions{...} to be told which name is wrong
#include <joinable/join.hpp>

#include <support/misuse.hpp>

struct Weights {
    std::vector<float> value, grad;
};
int main() {
    joinable::SelfCommunicator comm;
    std::vector<Weights> model(2);
    joinable::DistributedDataParallel ddp{comm, model, {.bucket_cap_byte = 1024}};
}
