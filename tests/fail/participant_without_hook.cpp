// SPDX-License-Identifier: BSL-1.0
// EXPECT: Joinable: expected a member 'join_hook(arguments<join_keywords>)' that returns a
// EXPECT: JoinHook by value
#include <joinable/join.hpp>

#include <support/misuse.hpp>

struct NoArguments : Good {
    Hook join_hook() { return {}; }
};
int main() {
    NoArguments bad;
    joinable::Join guard{joinable::participants(bad)};
}
