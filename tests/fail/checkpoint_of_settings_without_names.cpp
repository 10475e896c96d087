// SPDX-License-Identifier: BSL-1.0
// EXPECT: Checkpoint: a rule with settings needs a const member 'void agree_on(joinable::AgreementList& list)' that adds them: a file has the settings by these labels
#include <joinable/zero.hpp>

#include <joinable/checkpoint.hpp>

#include <span>
#include <string_view>
#include <vector>

struct Weight {
    std::vector<float> value, grad;
};
struct SignDescent {
    double learning_rate = 1e-3;
    static std::span<std::string_view const> state_names() { return {}; }
    template <class T>
    void update(joinable::UpdateRange<T> const&) const {}
};

int main() {
    joinable::SelfCommunicator comm;
    std::vector<Weight> weights(1);
    joinable::ZeroRedundancyOptimizer zero{comm, weights, SignDescent{}};
    joinable::Checkpoint save{zero, "model.safetensors"};
}
