// SPDX-License-Identifier: BSL-1.0
// EXPECT: RoundNotice and JoinOptions: weights and inputs are whole numbers; give an integer
#include <joinable/join.hpp>

#include <vector>

struct Weights {
    std::vector<float> value, grad;
};

int main() {
    joinable::SelfCommunicator comm;
    std::vector<Weights> model(2);
    joinable::DistributedDataParallel ddp{comm, model};
    ddp.forward([] {}, {.weight = 0.5});
}
