// SPDX-License-Identifier: BSL-1.0
// EXPECT: buffers: std::vector<bool> has no contiguous elements; use std::vector<unsigned char>, or an array of bool
#include <joinable/join.hpp>

#include <support/misuse.hpp>

int main() {
    std::vector<std::vector<bool>> masks(2);
    (void)joinable::buffers(masks);
}
