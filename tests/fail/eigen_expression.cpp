// SPDX-License-Identifier: BSL-1.0
// EXPECT: Tensor: this is an expression without memory of its own; assign it to a matrix or an array, and give that
#include <joinable/interop/eigen.hpp>

#include <joinable/communicator/collectives.hpp>
#include <joinable/communicator/self.hpp>

int main() {
    joinable::SelfCommunicator comm;
    Eigen::MatrixXf a(2, 3), b(2, 3);
    joinable::all_reduce(comm, a + b).wait();
}
