// SPDX-License-Identifier: BSL-1.0
// EXPECT: participants: a temporary cannot take part; give it a name that outlives the Join
#include <joinable/join.hpp>

#include <support/misuse.hpp>

int main() {
    joinable::Join guard{joinable::participants(Good{})};
}
