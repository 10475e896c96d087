// SPDX-License-Identifier: BSL-1.0
// EXPECT: sharded optimizer: this communicator moves the memory of a device, where a rule steps by its member 'template <class T, class F> decltype(auto) visit_update(std::uint64_t step, F const& f) const'
#include <joinable/zero.hpp>

#include <vector>

#include <support/device_archetype.hpp>

struct Weight {
    std::vector<float> value, grad;
};
struct Lion {
    std::span<std::string_view const> state_names() const { return {}; }
    template <class T>
    void update(joinable::UpdateRange<T> const&) const {}
};

int main() {
    joinable_tests::DeviceRanks comm;
    std::vector<Weight> weights(1);
    joinable::ZeroRedundancyOptimizer zero{comm, weights, Lion{}};
}
