// SPDX-License-Identifier: BSL-1.0
// EXPECT: Parameter: give the class members 'value' and 'grad' (public, of these names), or specialise joinable::parameter_traits for this very type
#include <joinable/zero.hpp>

#include <vector>

int main() {
    joinable::SelfCommunicator comm;
    std::vector<int> weights(1);
    joinable::ZeroRedundancyOptimizer zero{comm, weights, joinable::Adam{}};
}
