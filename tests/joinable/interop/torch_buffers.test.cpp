// SPDX-License-Identifier: BSL-1.0
// Buffers that a pass changes in place and calculates with. In y = last * (weight * seen) both weights are 1, so the gradient
// of each is `seen` as it was in the pass. The gradient of `last` is ready first; ranks then take the value of rank 0, before
// the backward pass reads what it saved of `seen`.
#include <joinable/interop/torch.hpp>

#include <torch/script.h>
#include <torch/torch.h> // before doctest: both have a macro CHECK

#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <support/ranks.hpp>
#include <support/torch_small_net.hpp>

#include <joinable/interop/torch_sharded.hpp>

namespace {

using joinable::BufferSync;
using joinable::ThreadCommunicator;
using joinable_tests::run_ranks;
using joinable_tests::small_net::refusal;
using torch::Tensor;

Tensor scalar(double value) {
    return torch::full({}, value, torch::kDouble);
}

struct GainImpl : torch::nn::Module {
    Tensor weight = register_parameter("weight", scalar(1));
    Tensor last = register_parameter("last", scalar(1));
    Tensor seen = register_buffer("seen", scalar(0));
    bool clones = false;

    Tensor forward(Tensor const& x) {
        {
            torch::NoGradGuard const quiet;
            seen += x;
        }
        return last * (weight * (clones ? seen.clone() : seen));
    }
};
TORCH_MODULE(Gain);

torch::jit::Module gain_script() {
    torch::jit::Module model{"Gain"};
    model.register_parameter("weight", scalar(1).requires_grad_(true), false);
    model.register_parameter("last", scalar(1).requires_grad_(true), false);
    model.register_buffer("seen", scalar(0));
    model.define(R"(
        def forward(self, x):
            self.seen += x
            return self.last * (self.weight * self.seen)
    )");
    return model;
}

/// What rank r adds to `seen` in a pass.
double input_of(int rank) {
    return 1 + rank;
}
/// After `passes` passes. All ranks began the last one with what rank 0 had.
double expected_gradient(int world, int passes) {
    double sum = 0;
    for (int rank = 0; rank < world; ++rank) {
        sum += (passes - 1) * input_of(0) + input_of(rank);
    }
    return sum / world;
}

void check_trains(ThreadCommunicator& comm, Gain& model, auto& ddp) {
    for (int passes = 1; passes <= 3; ++passes) {
        model->zero_grad();
        ddp.forward(scalar(input_of(comm.rank()))).backward();
        CHECK(
            model->weight.grad().item<double>() ==
            doctest::Approx(expected_gradient(comm.size(), passes))
        );
    }
}

TEST_CASE("autograd reads a buffer as the pass saw it, if it was sent before or the pass clones it"
) {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        Gain before;
        joinable::torch::DistributedDataParallel ddp{
            comm, before, {.buffer_sync = BufferSync::before_forward}
        };
        check_trains(comm, before, ddp);

        Gain cloned;
        cloned->clones = true;
        joinable::torch::DistributedDataParallel clones{comm, cloned};
        check_trains(comm, cloned, clones);
    });
}

TEST_CASE("libtorch refuses to read what a pass saved of a buffer that is sent after it") {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& all) {
        auto const check_refused = [&](auto const& train) {
            ThreadCommunicator comm = all.split(0, all.rank()); // what goes wrong ends with it
            std::string const text = refusal([&] { train(comm); });
            CAPTURE(text);
            CHECK(text.find("modified by an inplace operation") != std::string::npos);
        };
        check_refused([](ThreadCommunicator& comm) {
            Gain model;
            joinable::torch::DistributedDataParallel ddp{comm, model};
            ddp.forward(scalar(input_of(comm.rank()))).backward();
        });
        check_refused([](ThreadCommunicator& comm) {
            Gain model;
            joinable::torch::ShardedDataParallel sharded{
                comm,
                model,
                [](std::vector<Tensor> mine) { return torch::optim::SGD{std::move(mine), 0.1}; },
                {.sharding = joinable::Sharding::gradients}
            };
            sharded.forward(scalar(input_of(comm.rank()))).backward();
        });
        check_refused([](ThreadCommunicator& comm) {
            torch::jit::Module model = gain_script();
            joinable::torch::DistributedDataParallel ddp{comm, model};
            std::vector<torch::jit::IValue> const inputs{scalar(input_of(comm.rank()))};
            ddp.forward(inputs).toTensor().backward();
        });
    });
}

TEST_CASE("a buffer that the program sets between the passes is read as all ranks set it") {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        Gain model;
        joinable::torch::DistributedDataParallel ddp{comm, model};
        for (int passes = 1; passes <= 3; ++passes) {
            model->zero_grad();
            model->seen.fill_(passes);
            ddp.forward([&] { return model->last * (model->weight * model->seen); }).backward();
            CHECK(model->weight.grad().item<double>() == passes);
        }
    });
}

} // namespace
