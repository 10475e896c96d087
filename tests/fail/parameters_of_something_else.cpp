// SPDX-License-Identifier: BSL-1.0
// EXPECT: parameters: the elements of the range must model Parameter, or be pointers to such;
// EXPECT: give them members 'value' and 'grad', or specialise joinable::parameter_traits
#include <joinable/join.hpp>

#include <support/misuse.hpp>

int main() {
    std::vector<int> numbers(3);
    (void)joinable::parameters(numbers);
}
