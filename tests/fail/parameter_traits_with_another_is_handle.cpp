// SPDX-License-Identifier: BSL-1.0
// EXPECT: Parameter: parameter_traits::is_handle must be 'static constexpr bool is_handle = true'
#include <joinable/join.hpp>

#include <vector>

struct Weights {
    std::vector<float> numbers, slope;
};

template <>
struct joinable::parameter_traits<Weights> {
    static auto* value(Weights& w) { return &w.numbers; }
    static auto* grad(Weights& w) { return &w.slope; }
    static bool is_handle() { return true; }
};
static_assert(joinable::models_parameter<Weights>());
