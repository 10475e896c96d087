// SPDX-License-Identifier: BSL-1.0
// EXPECT: UpdateRule: expected a const member 'std::span<std::string_view const> state_names()'; a rule without state returns {}
#include <joinable/zero.hpp>

#include <vector>

struct Weight {
    std::vector<float> value, grad;
};
struct Lion {
    double learning_rate = 1e-4;
    template <class T>
    void update(joinable::UpdateRange<T> const&) const {}
};

int main() {
    joinable::SelfCommunicator comm;
    std::vector<Weight> weights(1);
    joinable::ZeroRedundancyOptimizer zero{comm, weights, Lion{}};
}
