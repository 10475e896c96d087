// SPDX-License-Identifier: BSL-1.0
// EXPECT: buffers: each argument must be a tensor that can be written, or a range of such or of
// EXPECT: such: not const, and with a specialisation of joinable::tensor_traits
#include <joinable/join.hpp>

#include <support/misuse.hpp>

int main() {
    std::string running_mean = "3.0"; // no tensor, nor a range of tensors
    (void)joinable::buffers(running_mean);
}
