// SPDX-License-Identifier: BSL-1.0
// EXPECT: Parameter: parameter_traits::grad_dtype must be 'static DType grad_dtype(P const&)'
#include <vector>

#include <joinable/join.hpp>

struct Weight {
    std::vector<joinable::BFloat16> value;
    std::vector<float> grad;
};

template <>
struct joinable::parameter_traits<Weight> {
    static std::vector<joinable::BFloat16>* value(Weight& w) { return &w.value; }
    static std::vector<float>* grad(Weight& w) { return &w.grad; }
    static int grad_dtype(Weight const&) { return 4; }
};

int main() {
    std::vector<Weight> weights(2);
    auto list = joinable::parameters(weights);
}
