// SPDX-License-Identifier: BSL-1.0
// EXPECT: a collective writes this tensor: give it one whose data() is a pointer to non-const
#include <joinable/join.hpp>

#include <vector>

#include <support/misuse.hpp>

int main() {
    joinable::SelfCommunicator comm;
    std::vector<float> const values(3);
    joinable::all_reduce(comm, values).wait();
}
