// SPDX-License-Identifier: BSL-1.0
// EXPECT: forward: after the pass comes a RoundNotice, as in ddp.forward(pass, {.weight = 32})
#include <joinable/join.hpp>

#include <support/misuse.hpp>

struct Weights {
    std::vector<float> value, grad;
};
int main() {
    joinable::SelfCommunicator comm;
    std::vector<Weights> model(2);
    joinable::DistributedDataParallel ddp{comm, model};
    ddp.forward([] {}, 32);
}
