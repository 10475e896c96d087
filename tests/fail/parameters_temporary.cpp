// SPDX-License-Identifier: BSL-1.0
// EXPECT: parameters: a temporary range of parameters would be gone before it is used
#include <support/misuse.hpp>

struct Parameter {
    std::vector<float> value;
    std::vector<float> grad;
};
int main() {
    (void)joinable::parameters(std::vector<Parameter>(2));
}
