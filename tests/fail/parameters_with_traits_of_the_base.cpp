// SPDX-License-Identifier: BSL-1.0
// EXPECT: Tensor: specialise joinable::tensor_traits for this very type (one for its base class does not
// EXPECT: count; see tensor/traits.hpp)
#include <joinable/join.hpp>

struct Base : std::vector<float> {};
struct Derived : Base {};
template <>
struct joinable::tensor_traits<Base> : joinable::tensor_traits<std::vector<float>> {};

struct Weights {
    Derived value, grad;
};
int main() {
    std::vector<Weights> model(2);
    (void)joinable::parameters(model);
}
