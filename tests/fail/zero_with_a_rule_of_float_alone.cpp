// SPDX-License-Identifier: BSL-1.0
// EXPECT: UpdateRule: expected a const member 'template <class T> void update(joinable::UpdateRange<T> const& range)' for float and double
#include <joinable/zero.hpp>

#include <vector>

struct Weight {
    std::vector<float> value, grad;
};
struct Lion {
    std::span<std::string_view const> state_names() const { return {}; }
    void update(joinable::UpdateRange<float> const&) const {}
};

int main() {
    joinable::SelfCommunicator comm;
    std::vector<Weight> weights(1);
    joinable::ZeroRedundancyOptimizer zero{comm, weights, Lion{}};
}
