// SPDX-License-Identifier: BSL-1.0
// EXPECT: parameters: const parameters cannot be trained, since values and gradients are
// EXPECT: written; give a range or pointers that are not const
#include <joinable/join.hpp>

#include <support/misuse.hpp>

struct Parameter {
    std::vector<float> value;
    std::vector<float> grad;
};
int main() {
    std::vector<Parameter> const frozen(2);
    (void)joinable::parameters(frozen);
}
