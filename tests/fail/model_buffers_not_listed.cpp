// SPDX-License-Identifier: BSL-1.0
// EXPECT: DistributedDataParallel: after the parameters come buffers(ranges...), if the model
// EXPECT: has any, then options in braces with the names and the order of DataParallelOptions
#include <joinable/join.hpp>

#include <support/misuse.hpp>

struct Parameter {
    std::vector<float> value;
    std::vector<float> grad;
};
int main() {
    joinable::SelfCommunicator comm;
    std::vector<Parameter> parameters(2);
    std::vector<std::vector<float>> running_means(2);
    joinable::DistributedDataParallel ddp{comm, parameters, running_means};
}
