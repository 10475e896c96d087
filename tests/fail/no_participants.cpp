// SPDX-License-Identifier: BSL-1.0
// EXPECT: participants: a Join needs at least one participant
#include <joinable/join.hpp>

#include <support/misuse.hpp>

int main() {
    (void)joinable::participants();
}
