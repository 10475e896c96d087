// SPDX-License-Identifier: BSL-1.0
// EXPECT: Parameter: parameter_traits::set_grad must be 'static void set_grad(P&, AnyView)'
#include <joinable/join.hpp>

#include <vector>

struct Weights {
    std::vector<float> numbers, slope;
};

template <>
struct joinable::parameter_traits<Weights> {
    static auto* value(Weights& w) { return &w.numbers; }
    static auto* grad(Weights& w) { return &w.slope; }
    static void set_grad(Weights& w, std::vector<float>& slope) { w.slope = slope; }
};
static_assert(joinable::models_parameter<Weights>());
