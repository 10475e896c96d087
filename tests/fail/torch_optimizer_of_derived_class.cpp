// SPDX-License-Identifier: BSL-1.0
// EXPECT: torch::Optimizer: the factory returns a class derived from this one's, whose own step() would be lost; name that class here, or make an Optimizer of its own
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
