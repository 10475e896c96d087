// SPDX-License-Identifier: BSL-1.0
// EXPECT: a collective takes the communicator first, which is an object with a name and not const, as in all_reduce(comm, tensor)
#include <joinable/join.hpp>

#include <vector>

int main() {
    joinable::SelfCommunicator comm;
    std::vector<float> tensor(3);
    joinable::all_reduce(tensor, comm).wait();
}
