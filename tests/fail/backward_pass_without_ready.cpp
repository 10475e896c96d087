// SPDX-License-Identifier: BSL-1.0
// EXPECT: backward: the pass takes a callable, as in ddp.backward([&](auto ready) { ... }), and calls ready(i)
// EXPECT: { ... }), and calls ready(i) when gradient i is final
#include <joinable/join.hpp>

#include <support/misuse.hpp>

struct Weights {
    std::vector<float> value, grad;
};
int main() {
    joinable::SelfCommunicator comm;
    std::vector<Weights> model(2);
    joinable::DistributedDataParallel ddp{comm, model};
    ddp.forward([] {});
    ddp.backward([] {});
}
