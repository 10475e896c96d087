// SPDX-License-Identifier: BSL-1.0
// EXPECT: views::bucketed: the elements of the range must model Tensor or Parameter, or be a
// EXPECT: TensorSize; specialise joinable::tensor_traits for their type
#include <joinable/join.hpp>

#include <support/misuse.hpp>

int main() {
    std::vector<int> const sizes{1, 2, 3};
    (void)(sizes | joinable::views::bucketed({400}));
}
