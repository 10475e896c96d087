// SPDX-License-Identifier: BSL-1.0
// EXPECT: Tensor: bool has no DType, and std::vector<bool> no contiguous elements; use unsigned char
#include <joinable/join.hpp>

#include <support/misuse.hpp>

int main() {
    joinable::SelfCommunicator comm;
    std::array<bool, 3> mask{};
    joinable::broadcast(comm, mask, 0).wait();
}
