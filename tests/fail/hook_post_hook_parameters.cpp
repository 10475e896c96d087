// SPDX-License-Identifier: BSL-1.0
// EXPECT: JoinHook: post_hook cannot be called; its parameters must be 'void post_hook(bool
// EXPECT: is_last_joiner)' or 'void post_hook(JoinResult const&)'
#include <joinable/join.hpp>

#include <support/misuse.hpp>

struct NeedsNothing : Good {
    struct Wrong {
        void main_hook() {}
        void post_hook() {}
    };
    Wrong join_hook(joinable::arguments<joinable::keywords<>> const&) { return {}; }
};
int main() {
    NeedsNothing bad;
    joinable::Join guard{joinable::participants(bad)};
}
