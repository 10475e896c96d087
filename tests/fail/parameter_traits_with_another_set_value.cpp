// SPDX-License-Identifier: BSL-1.0
// EXPECT: Parameter: parameter_traits needs both 'static void set_value(P&, AnyView)' and 'static void release_value(P&)', or neither
#include <joinable/join.hpp>

#include <vector>

struct Weights {
    std::vector<float> numbers, slope;
};

template <>
struct joinable::parameter_traits<Weights> {
    static auto* value(Weights& w) { return &w.numbers; }
    static auto* grad(Weights& w) { return &w.slope; }
    static void set_value(Weights&, float*) {}
    static void release_value(Weights&) {}
};
static_assert(joinable::models_parameter<Weights>());
