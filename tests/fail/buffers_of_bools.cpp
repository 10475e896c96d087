// SPDX-License-Identifier: BSL-1.0
// EXPECT: buffers: bool has no DType, and std::vector<bool> no contiguous elements; use unsigned char
#include <joinable/join.hpp>

#include <support/misuse.hpp>

int main() {
    std::vector<std::array<bool, 4>> masks(2);
    (void)joinable::buffers(masks);
}
