// SPDX-License-Identifier: BSL-1.0
// EXPECT: forward: the pass is a callable, as in ddp.forward([&] { loss = model.forward(batch); });
#include <joinable/join.hpp>

struct Weights {
    std::vector<float> value, grad;
};
int main() {
    joinable::SelfCommunicator comm;
    std::vector<Weights> model(2);
    joinable::DistributedDataParallel ddp{comm, model};
    float const loss = 3;
    ddp.forward(loss);
}
