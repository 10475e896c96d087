// SPDX-License-Identifier: BSL-1.0
// EXPECT: skip: it takes no argument or a RoundNotice, as in ddp.skip({.weight = 0})
#include <joinable/join.hpp>

#include <vector>

struct Weights {
    std::vector<float> value, grad;
};
int main() {
    joinable::SelfCommunicator comm;
    std::vector<Weights> model(2);
    joinable::DistributedDataParallel ddp{comm, model};
    ddp.skip(5);
}
