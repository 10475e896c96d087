// SPDX-License-Identifier: BSL-1.0
// EXPECT: participants: a const object cannot take part, because the guard changes its join_state()
#include <support/misuse.hpp>

int main() {
    Good const good;
    joinable::Join guard{joinable::participants(good)};
}
