// SPDX-License-Identifier: BSL-1.0
// EXPECT: RoundNotice and JoinOptions: weights and inputs are whole numbers; give an integer
#include <joinable/join.hpp>

#include <support/misuse.hpp>

int main() {
    Good good;
    joinable::Join guard{joinable::participants(good), joinable::JoinOptions{.inputs = 2.5}};
}
