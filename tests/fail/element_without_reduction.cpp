// SPDX-License-Identifier: BSL-1.0
// EXPECT: a collective cannot reduce these elements; use float, double, Half, BFloat16 or an
// EXPECT: integer of 1, 4 or 8 bytes
#include <vector>

#include <joinable/join.hpp>

#include <support/misuse.hpp>

int main() {
    joinable::SelfCommunicator comm;
    std::vector<short> counts(3);
    joinable::all_reduce(comm, counts).wait();
}
