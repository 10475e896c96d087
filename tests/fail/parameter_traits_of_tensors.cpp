// SPDX-License-Identifier: BSL-1.0
// EXPECT: Parameter: parameter_traits::value and grad return something to dereference, as a pointer to a
// EXPECT: tensor or a std::optional view, not the tensor itself
#include <joinable/join.hpp>

struct Weights {
    std::vector<float> data, gradient;
};
template <>
struct joinable::parameter_traits<Weights> {
    static auto& value(Weights& w) { return w.data; }
    static auto& grad(Weights& w) { return w.gradient; }
};
int main() {
    std::vector<Weights> model(2);
    (void)joinable::parameters(model);
}
