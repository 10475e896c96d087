// SPDX-License-Identifier: BSL-1.0
// EXPECT: shadowed: this communicator has no member 'split(int color, int key)'; use one that models
#include <joinable/join.hpp>
#include <joinable/shadowed.hpp>

#include <support/misuse.hpp>

struct NeverSplit : Deaf {
    joinable::CompletedWork all_reduce(joinable::Buffer, joinable::ReduceOp) { return {}; }
};

int main() {
    NeverSplit comm;
    auto hidden = joinable::shadowed(comm);
}
