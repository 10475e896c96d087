// SPDX-License-Identifier: BSL-1.0
// EXPECT: forward: the pass is a callable, as in ddp.forward([&] { loss = model.forward(batch); });
#include <joinable/zero.hpp>

struct Weights {
    std::vector<float> value, grad;
};
int main() {
    joinable::SelfCommunicator comm;
    std::vector<Weights> model(2);
    joinable::ShardedDataParallel sharded{comm, model, joinable::Adam{}};
    sharded.forward(3.0F);
}
