// SPDX-License-Identifier: BSL-1.0
// EXPECT: JoinHook: takes_part cannot be asked; declare it 'static bool takes_part(Round
// EXPECT: const&)'
#include <joinable/join.hpp>

#include <support/misuse.hpp>

struct Sometimes : Good {
    struct Wrong : Hook {
        bool takes_part(joinable::Round const& round) const { return round.will_sync(); }
    };
    Wrong join_hook(joinable::arguments<joinable::keywords<>> const&) { return {}; }
};
int main() {
    Sometimes bad;
    joinable::Join guard{joinable::participants(bad)};
}
