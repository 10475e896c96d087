// SPDX-License-Identifier: BSL-1.0
// EXPECT: SharedObject: ranks send the object as it is in memory, but it has a pointer or a reference, and an address leads nowhere on another rank; give a struct of numbers
#include <joinable/zero.hpp>

struct Scale {
    double& factor;
};

int main() {
    double factor = 1;
    Scale scale{factor};
    joinable::ZeroOptions const options{.shared = {scale}};
}
