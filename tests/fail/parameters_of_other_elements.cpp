// SPDX-License-Identifier: BSL-1.0
// EXPECT: Tensor: the elements have no DType; use float, double, Half, BFloat16, bool, a complex number of float or double, or an integer of at most 8 bytes
#include <joinable/join.hpp>

#include <support/misuse.hpp>

struct Weights {
    std::vector<long double> value, grad;
};
int main() {
    std::vector<Weights> model(2);
    (void)joinable::parameters(model);
}
