// SPDX-License-Identifier: BSL-1.0
// EXPECT: Step: after the communicator comes an optimizer of libtorch, as in Step step{comm, optimizer}
#include <joinable/communicator/self.hpp>
#include <joinable/interop/torch.hpp>

void train(joinable::SelfCommunicator& comm, at::Tensor& learning_rate) {
    joinable::torch::Step step{comm, learning_rate};
}
