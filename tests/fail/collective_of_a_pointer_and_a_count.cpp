// SPDX-License-Identifier: BSL-1.0
// EXPECT: a collective takes tensors; give a pointer and its count as a span, as in all_reduce(comm,
// EXPECT: std::span{pointer, count})
#include <joinable/join.hpp>

int main() {
    joinable::SelfCommunicator comm;
    std::vector<float> loss(4);
    joinable::all_reduce(comm, loss.data(), loss.size()).wait();
}
