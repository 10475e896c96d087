// SPDX-License-Identifier: BSL-1.0
// EXPECT: JoinHook: main_hook cannot be called; its parameters must be 'void main_hook()' or
// EXPECT: 'void main_hook(Round const&)'
#include <joinable/join.hpp>

#include <support/misuse.hpp>

struct NeedsRounds : Good {
    struct Wrong {
        void main_hook(int) {}
        void post_hook(bool) {}
    };
    Wrong join_hook(joinable::arguments<joinable::keywords<>> const&) { return {}; }
};
int main() {
    NeedsRounds bad;
    joinable::Join guard{joinable::participants(bad)};
}
