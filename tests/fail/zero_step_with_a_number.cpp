// SPDX-License-Identifier: BSL-1.0
// EXPECT: step: expected a function that takes nothing and runs the passes, as in optimizer.step([&] { ...; return loss; })
#include <vector>

#include <joinable/zero.hpp>

struct Parameter {
    std::vector<float> value, grad;
};

int main() {
    joinable::SelfCommunicator comm;
    std::vector<Parameter> model(1);
    joinable::ZeroRedundancyOptimizer zero{comm, model, joinable::Sgd{}};
    zero.step(5);
}
