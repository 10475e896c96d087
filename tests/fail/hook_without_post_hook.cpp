// SPDX-License-Identifier: BSL-1.0
// EXPECT: JoinHook: expected a member 'void post_hook(bool is_last_joiner)'
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
