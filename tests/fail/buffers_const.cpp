// SPDX-License-Identifier: BSL-1.0
// EXPECT: buffers: the elements of each range must be tensors that can be written, or pointers to
// EXPECT: such: not const, and with a specialisation of joinable::tensor_traits
#include <joinable/join.hpp>

#include <support/misuse.hpp>

int main() {
    std::vector<std::vector<float>> const frozen(2);
    (void)joinable::buffers(frozen);
}
