// SPDX-License-Identifier: BSL-1.0
// EXPECT: Parameter: parameter_traits::value and grad return something to dereference, as a pointer to a tensor or a std::optional view, not the tensor itself
#include <joinable/join.hpp>

#include <vector>

struct Weights {
    std::vector<float> numbers, slope;
};

template <>
struct joinable::parameter_traits<Weights> {
    static auto* value(Weights& w) { return &w.numbers; }
    static bool grad(Weights const& w) { return !w.slope.empty(); }
};
static_assert(joinable::models_parameter<Weights>());
