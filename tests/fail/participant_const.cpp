// SPDX-License-Identifier: BSL-1.0
// EXPECT: participants: a const object cannot take part, because the guard changes its
// EXPECT: join_state(); pass one that is not const
#include <joinable/join.hpp>

#include <support/misuse.hpp>

int main() {
    Good const good;
    joinable::Join guard{joinable::participants(good)};
}
