// SPDX-License-Identifier: BSL-1.0
// EXPECT: buffers: bool has no DType, and std::vector<bool> no contiguous elements; use unsigned char
#include <joinable/join.hpp>

#include <support/misuse.hpp>

int main() {
    std::vector<bool> mask(3);
    (void)joinable::buffers(mask);
}
