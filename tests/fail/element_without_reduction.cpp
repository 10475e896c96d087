// SPDX-License-Identifier: BSL-1.0
// EXPECT: a reduction: integers of 16 bits are broadcast, gathered and stored, but not reduced; use int
#include <joinable/join.hpp>

#include <vector>

#include <support/misuse.hpp>

int main() {
    joinable::SelfCommunicator comm;
    std::vector<short> counts(3);
    joinable::all_reduce(comm, counts).wait();
}
