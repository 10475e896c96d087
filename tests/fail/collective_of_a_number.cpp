// SPDX-License-Identifier: BSL-1.0
// EXPECT: Tensor: a number is no tensor; give std::span{&number, 1}
#include <joinable/join.hpp>

int main() {
    joinable::SelfCommunicator comm;
    int inputs = 1;
    joinable::all_reduce(comm, inputs).wait();
}
