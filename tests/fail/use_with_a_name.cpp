// SPDX-License-Identifier: BSL-1.0
// EXPECT: use: it takes the index of a parameter in the list that was given, as in use(0)
#include <joinable/zero.hpp>

#include <vector>

struct Weights {
    std::vector<float> value, grad;
};
int main() {
    joinable::SelfCommunicator comm;
    std::vector<Weights> model(2);
    joinable::ShardedDataParallel sharded{comm, model, joinable::Adam{}};
    sharded.forward([](auto use) { auto const held = use("W"); });
}
