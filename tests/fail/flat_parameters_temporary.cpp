// SPDX-License-Identifier: BSL-1.0
// EXPECT: flat_parameters: temporary memory would be destroyed before it is used; give it a name
#include <joinable/join.hpp>

#include <support/misuse.hpp>

int main() {
    std::vector<float> values(6);
    (void)joinable::flat_parameters(values, std::vector<float>(6), std::array{4, 2});
}
