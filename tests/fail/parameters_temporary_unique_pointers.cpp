// SPDX-License-Identifier: BSL-1.0
// EXPECT: parameters, buffers: a temporary range of unique pointers would take its objects with it;
// EXPECT: give the range a name, or use shared pointers
#include <joinable/join.hpp>

#include <memory>

#include <support/misuse.hpp>

struct Parameter {
    std::vector<float> value;
    std::vector<float> grad;
};
int main() {
    (void)joinable::parameters(std::vector<std::unique_ptr<Parameter>>(2));
}
