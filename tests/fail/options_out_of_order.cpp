// SPDX-License-Identifier: BSL-1.0
// EXPECT(g++): designator order for field
// EXPECT(clang++): ISO C++ requires field designators to be specified in declaration order
// EXPECT(nvcc): out-of-order initializers are nonstandard
#include <joinable/join.hpp>

#include <support/misuse.hpp>

int main() {
    Good good;
    joinable::Join guard{
        joinable::participants(good), {.end_policy = joinable::EndPolicy::drain, .enable = true}
    };
}
