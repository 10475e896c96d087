// SPDX-License-Identifier: BSL-1.0
// EXPECT: LocalOptimizer: expected a member 'S& settings()' with a trivially copyable S, such as a struct with the learning rate: joined ranks get the settings of the others
#include <joinable/zero.hpp>

#include <vector>

struct Weight {
    std::vector<float> value, grad;
};
struct Lamb {
    double learning_rate = 1e-3;
    void step(joinable::WholeParameter const&) {}
};

int main() {
    joinable::SelfCommunicator comm;
    std::vector<Weight> weights(1);
    joinable::ZeroRedundancyOptimizer zero{comm, weights, Lamb{}};
}
