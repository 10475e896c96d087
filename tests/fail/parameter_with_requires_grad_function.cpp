// SPDX-License-Identifier: BSL-1.0
// EXPECT: Parameter: requires_grad must be a data member that converts to bool, or 'static bool requires_grad(P const&)' in parameter_traits; else frozen parameters would be trained
#include <joinable/join.hpp>

#include <vector>

struct Weights {
    std::vector<float> value, grad;
    bool requires_grad() const { return false; }
};

int main() {
    joinable::SelfCommunicator comm;
    std::vector<Weights> model(2);
    joinable::DistributedDataParallel ddp{comm, model};
}
