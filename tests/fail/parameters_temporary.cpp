// SPDX-License-Identifier: BSL-1.0
// EXPECT: parameters: a temporary range of parameters would be gone before it is used; give the
// EXPECT: range a name, or set parameter_traits::is_handle if copies share storage
#include <joinable/join.hpp>

#include <support/misuse.hpp>

struct Parameter {
    std::vector<float> value;
    std::vector<float> grad;
};
int main() {
    (void)joinable::parameters(std::vector<Parameter>(2));
}
