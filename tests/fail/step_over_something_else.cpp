// SPDX-License-Identifier: BSL-1.0
// EXPECT: Communicator: expected a member 'Work all_reduce(Buffer, ReduceOp)' (in place)
#include <joinable/join.hpp>

#include <support/misuse.hpp>

int main() {
    Deaf comm;
    joinable::Step step{comm, [] {}};
}
