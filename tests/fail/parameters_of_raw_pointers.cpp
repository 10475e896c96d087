// SPDX-License-Identifier: BSL-1.0
// EXPECT: Parameter: 'value' or 'grad' is a raw pointer, which does not say how many elements it has;
// EXPECT: use std::span, or specialise joinable::parameter_traits
#include <joinable/join.hpp>

struct Weights {
    float* value;
    float* grad;
};
int main() {
    std::vector<Weights> model(2);
    (void)joinable::parameters(model);
}
