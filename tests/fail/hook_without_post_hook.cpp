// SPDX-License-Identifier: BSL-1.0
// EXPECT: JoinHook: expected a member 'void post_hook(bool is_last_joiner)' or 'void
// EXPECT: post_hook(JoinResult const&)'
#include <joinable/join.hpp>

#include <support/misuse.hpp>

struct NoPost : Good {
    struct Half {
        void main_hook() {}
    };
    Half join_hook(joinable::arguments<joinable::keywords<>> const&) { return {}; }
};
int main() {
    NoPost bad;
    joinable::Join guard{joinable::participants(bad)};
}
