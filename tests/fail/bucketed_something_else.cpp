// SPDX-License-Identifier: BSL-1.0
// EXPECT: views::bucketed: the elements of the range must model Tensor or Parameter
#include <support/misuse.hpp>

int main() {
    std::vector<int> const sizes{1, 2, 3};
    (void)(sizes | joinable::views::bucketed({400}));
}
