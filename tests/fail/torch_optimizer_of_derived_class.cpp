// SPDX-License-Identifier: BSL-1.0
// EXPECT: torch::Optimizer: this factory does not return the class of this Optimizer, and what another one adds, as its own step(), would be lost; make an Optimizer of that class
#include <utility>
#include <vector>

#include <joinable/communicator/self.hpp>
#include <joinable/interop/torch_optimizer.hpp>

struct Mine : torch::optim::SGD {
    using SGD::SGD;
};

void train(joinable::SelfCommunicator& comm, std::vector<at::Tensor> const& parameters) {
    joinable::torch::Optimizer zero{comm, parameters, [](std::vector<at::Tensor> mine) {
                                        return torch::optim::SGD{std::move(mine), 0.1};
                                    }};
    zero.add_parameter_group(parameters, [](std::vector<at::Tensor> mine) {
        return Mine{std::move(mine), torch::optim::SGDOptions{0.2}};
    });
}
