// SPDX-License-Identifier: BSL-1.0
// EXPECT: Step: LBFGS runs its closure as often as its own rank's losses ask for, so ranks would run different numbers of rounds; take SGD, Adam, AdamW, RMSprop or Adagrad
#include <joinable/communicator/self.hpp>
#include <joinable/interop/torch.hpp>
#include <torch/optim/lbfgs.h>

void train(joinable::SelfCommunicator& comm, torch::optim::LBFGS& optimizer) {
    joinable::torch::Step step{comm, optimizer};
}
