// SPDX-License-Identifier: BSL-1.0
// EXPECT: Tensor: specialise joinable::tensor_traits for this very type
#include <joinable/join.hpp>

#include <support/misuse.hpp>

struct Foreign {};
int main() {
    joinable::SelfCommunicator comm;
    Foreign tensor;
    joinable::all_reduce(comm, tensor).wait();
}
