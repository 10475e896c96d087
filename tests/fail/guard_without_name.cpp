// SPDX-License-Identifier: BSL-1.0
// EXPECT: a Join guards until it is destroyed: give it a name
#include <joinable/join.hpp>

#include <support/misuse.hpp>

int main() {
    Good good;
    joinable::Join{joinable::participants(good)};
}
