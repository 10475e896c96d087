// SPDX-License-Identifier: BSL-1.0
// EXPECT: Parameter: requires_grad must be a data member that converts to bool, or 'static bool requires_grad(P const&)' in parameter_traits; else frozen parameters would be trained
#include <joinable/join.hpp>

#include <vector>

struct Weights {
    std::vector<float> numbers, slope;
};

template <>
struct joinable::parameter_traits<Weights> {
    static auto* value(Weights& w) { return &w.numbers; }
    static auto* grad(Weights& w) { return &w.slope; }
    static bool requires_grad(Weights& w) { return !w.slope.empty(); }
};
static_assert(joinable::models_parameter<Weights>());
