// SPDX-License-Identifier: BSL-1.0
// EXPECT: parameters, buffers: a temporary object, or a temporary range of objects, would be destroyed
// EXPECT: it a name, or set parameter_traits::is_handle if copies share storage
#include <joinable/join.hpp>

#include <support/misuse.hpp>

struct Parameter {
    std::vector<float> value;
    std::vector<float> grad;
};
int main() {
    (void)joinable::parameters(std::vector<Parameter>(2));
}
