// SPDX-License-Identifier: BSL-1.0
// EXPECT: ready: it takes the index of a parameter in the list that was given, as in ready(0)
#include <joinable/join.hpp>

#include <vector>

struct Weights {
    std::vector<float> value, grad;
};
int main() {
    joinable::SelfCommunicator comm;
    std::vector<Weights> model(2);
    joinable::DistributedDataParallel ddp{comm, model};
    ddp.forward([] {});
    ddp.backward([](auto ready) { ready("W"); });
}
