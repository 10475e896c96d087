// SPDX-License-Identifier: BSL-1.0
// EXPECT: Parameter: a model was given in place of its parameters; give model.parameters()
#include <joinable/join.hpp>

struct Weights {
    std::vector<float> value, grad;
};
struct Model {
    std::vector<Weights> weights{2};
    std::vector<Weights>& parameters() { return weights; }
};
int main() {
    joinable::SelfCommunicator comm;
    Model model;
    joinable::DistributedDataParallel ddp{comm, model};
}
