// SPDX-License-Identifier: BSL-1.0
// EXPECT: Parameter: give the class members 'value' and 'grad' (public, of these names), or specialise
// EXPECT: joinable::parameter_traits for this very type
#include <joinable/join.hpp>

#include <support/misuse.hpp>

int main() {
    std::vector<int> numbers(3);
    (void)joinable::parameters(numbers);
}
