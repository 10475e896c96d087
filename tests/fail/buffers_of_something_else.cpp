// SPDX-License-Identifier: BSL-1.0
// EXPECT: buffers: the elements of each range must model Tensor, or be pointers to such; specialise
// EXPECT: joinable::tensor_traits for their type
#include <joinable/join.hpp>

#include <support/misuse.hpp>

int main() {
    std::vector<float> running_mean(3); // one tensor, no range of tensors
    (void)joinable::buffers(running_mean);
}
