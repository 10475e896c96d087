// SPDX-License-Identifier: BSL-1.0
// EXPECT: Parameter: parameter_traits::value or grad returns a pointer to a number, which does not say how many there
// EXPECT: are; return std::optional{std::span{pointer, count}}
#include <joinable/join.hpp>

#include <vector>

struct Weights {
    float *data, *slope;
    int count;
};
template <>
struct joinable::parameter_traits<Weights> {
    static float* value(Weights& w) { return w.data; }
    static float* grad(Weights& w) { return w.slope; }
};
int main() {
    std::vector<Weights> model(2);
    (void)joinable::parameters(model);
}
