// SPDX-License-Identifier: BSL-1.0
// EXPECT: broadcast: say from which rank the tensor is copied, as in broadcast(comm, tensor, 0)
#include <joinable/join.hpp>

#include <vector>

int main() {
    joinable::SelfCommunicator comm;
    std::vector<float> tensor(3);
    joinable::broadcast(comm, tensor).wait();
}
