// SPDX-License-Identifier: BSL-1.0
// EXPECT: Tensor: the elements have no DType; use float, double, Half, BFloat16 or an integer of 1, 4 or 8 bytes
#include <joinable/join.hpp>

#include <vector>

#include <support/misuse.hpp>

int main() {
    joinable::SelfCommunicator comm;
    std::vector<short> counts(3);
    joinable::all_reduce(comm, counts).wait();
}
