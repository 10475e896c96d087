// SPDX-License-Identifier: BSL-1.0
// EXPECT: refresh: an engine's optimizer keeps its state itself; make the optimizer anew, of the new parameters, and move the state with a Checkpoint or on the owner of each parameter, which owner_of() names
#include <vector>

#include <joinable/zero.hpp>

struct Parameter {
    std::vector<float> value, grad;
};
struct Optimizer {
    struct Settings {
        double learning_rate = 0.5;
    } rate;
    Settings& settings() { return rate; }
    void step(joinable::WholeParameter const&) {}
};

int main() {
    joinable::SelfCommunicator comm;
    std::vector<Parameter> model(1);
    joinable::ZeroRedundancyOptimizer zero{comm, model, Optimizer{}};
    zero.refresh();
}
