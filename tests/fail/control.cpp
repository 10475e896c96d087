// SPDX-License-Identifier: BSL-1.0
#include <joinable/join.hpp>

#include <support/misuse.hpp>

int main() {
    Good good;
    joinable::Join guard{joinable::participants(good), {.end_policy = joinable::EndPolicy::drain}};
}
