// SPDX-License-Identifier: BSL-1.0
// EXPECT: UpdateRule: state_names() returns an array by value, which dies before its span is read; return a span of a static array, or a reference to it
#include <joinable/zero.hpp>

#include <array>
#include <string_view>
#include <vector>

struct Weight {
    std::vector<float> value, grad;
};
struct Momentum {
    double learning_rate = 1e-4;
    std::array<std::string_view, 1> state_names() const { return {"velocity"}; }
    template <class T>
    void update(joinable::UpdateRange<T> const&) const {}
};

int main() {
    joinable::SelfCommunicator comm;
    std::vector<Weight> weights(1);
    joinable::ZeroRedundancyOptimizer zero{comm, weights, Momentum{}};
}
