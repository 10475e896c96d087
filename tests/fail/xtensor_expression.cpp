// SPDX-License-Identifier: BSL-1.0
// EXPECT: Tensor: this is an expression without memory of its own; assign it to a matrix or an array, and give that
#include <joinable/interop/xtensor.hpp>

#include <joinable/communicator/collectives.hpp>
#include <joinable/communicator/self.hpp>
#include <xtensor/xtensor.hpp>

int main() {
    joinable::SelfCommunicator comm;
    xt::xtensor<float, 2> a, b;
    joinable::all_reduce(comm, a + b).wait();
}
