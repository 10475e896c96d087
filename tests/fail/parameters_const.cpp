// SPDX-License-Identifier: BSL-1.0
// EXPECT: parameters: const parameters cannot be trained
#include <support/misuse.hpp>

struct Parameter {
    std::vector<float> value;
    std::vector<float> grad;
};
int main() {
    std::vector<Parameter> const frozen(2);
    (void)joinable::parameters(frozen);
}
