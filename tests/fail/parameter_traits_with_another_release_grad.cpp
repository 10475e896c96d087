// SPDX-License-Identifier: BSL-1.0
// EXPECT: Parameter: parameter_traits::release_grad must be 'static void release_grad(P&)'
#include <joinable/join.hpp>

#include <vector>

struct Weights {
    std::vector<float> numbers, slope;
};

template <>
struct joinable::parameter_traits<Weights> {
    static auto* value(Weights& w) { return &w.numbers; }
    static auto* grad(Weights& w) { return &w.slope; }
    static void release_grad(Weights* w) { w->slope.clear(); }
};
static_assert(joinable::models_parameter<Weights>());
