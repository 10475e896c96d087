// SPDX-License-Identifier: BSL-1.0
// EXPECT: JoinHook: expected a member 'void main_hook()' or 'void main_hook(Round const&)'
#include <joinable/join.hpp>

#include <support/misuse.hpp>

struct NoMain : Good {
    struct Half {
        void post_hook(bool) {}
    };
    Half join_hook(joinable::arguments<joinable::keywords<>> const&) { return {}; }
};
int main() {
    NoMain bad;
    joinable::Join guard{joinable::participants(bad)};
}
