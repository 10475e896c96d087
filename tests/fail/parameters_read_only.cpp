// SPDX-License-Identifier: BSL-1.0
// EXPECT: Tensor: tensor_traits::data returns a pointer to const elements, but values, gradients and
// EXPECT: buffers are written; return one to elements that are not const
#include <joinable/join.hpp>

struct Weights {
    std::span<float const> value, grad;
};
int main() {
    std::vector<Weights> model(2);
    (void)joinable::parameters(model);
}
