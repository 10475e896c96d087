// SPDX-License-Identifier: BSL-1.0
// EXPECT: Parameter: parameter_traits::name must be 'static std::string_view name(P const&)', a view of a text that the parameter keeps
#include <joinable/join.hpp>

#include <string>
#include <vector>

struct Weights {
    std::vector<float> numbers, slope;
};

template <>
struct joinable::parameter_traits<Weights> {
    static auto* value(Weights& w) { return &w.numbers; }
    static auto* grad(Weights& w) { return &w.slope; }
    static std::string name(Weights const&) { return "a name that dies"; }
};
static_assert(joinable::models_parameter<Weights>());
