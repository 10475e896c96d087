// SPDX-License-Identifier: BSL-1.0
// EXPECT: these hooks must run both before and after each other (see hooks_on_cycle<...>);
// EXPECT: remove one of their before or after labels
#include <joinable/join.hpp>

#include <support/misuse.hpp>

struct SecondHook;
struct FirstHook : Hook {
    using runs_after = joinable::labels_of<SecondHook>;
};
struct SecondHook : Hook {
    using runs_after = joinable::labels_of<FirstHook>;
};
struct First : Good {
    FirstHook join_hook(joinable::arguments<joinable::keywords<>> const&) { return {}; }
};
struct Second : Good {
    SecondHook join_hook(joinable::arguments<joinable::keywords<>> const&) { return {}; }
};
int main() {
    First first;
    Second second;
    joinable::Join guard{joinable::participants(first, second)};
}
