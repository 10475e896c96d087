// SPDX-License-Identifier: BSL-1.0
// EXPECT: SharedObject: ranks send the object as it is in memory; give one that is trivially copyable and not const, such as a struct of numbers
#include <joinable/zero.hpp>

#include <vector>

int main() {
    std::vector<double> scales{1.0};
    joinable::ZeroOptions const options{.shared = {scales}};
}
