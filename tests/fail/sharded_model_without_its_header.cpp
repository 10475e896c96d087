// SPDX-License-Identifier: BSL-1.0
// EXPECT: ShardedDataParallel: include <joinable/zero.hpp>, and give a communicator, parameters and the optimizer as in Adam{...}
#include <joinable/join.hpp>

struct Weights {
    std::vector<float> value, grad;
};
int main() {
    joinable::SelfCommunicator comm;
    std::vector<Weights> model(2);
    joinable::ShardedDataParallel sharded{comm, model, joinable::AdamW{}};
}
