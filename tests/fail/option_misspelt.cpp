// SPDX-License-Identifier: BSL-1.0
// EXPECT: Join: what follows participants(...) must be control(comm) if needed, then options in
// EXPECT: braces with the names and the order of JoinOptions, then keyword = value; write
// EXPECT: JoinOptions{...} to be told which name is wrong
#include <joinable/join.hpp>

#include <support/misuse.hpp>

int main() {
    Good good;
    joinable::Join guard{joinable::participants(good), {.end_polcy = joinable::EndPolicy::drain}};
}
