// SPDX-License-Identifier: BSL-1.0
// EXPECT: buffers: const tensors cannot be written, but their values come from other ranks; give a
// EXPECT: range or pointers that are not const
#include <joinable/join.hpp>

#include <support/misuse.hpp>

int main() {
    std::vector<std::vector<float>> const frozen(2);
    (void)joinable::buffers(frozen);
}
