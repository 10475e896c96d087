// SPDX-License-Identifier: BSL-1.0
// EXPECT: Join: put participants(...) first, as in Join guard{participants(a, b), {.end_policy =
// EXPECT: EndPolicy::drain}, keyword = value}
#include <joinable/join.hpp>

#include <support/misuse.hpp>

int main() {
    Good good;
    joinable::Join guard{good};
}
