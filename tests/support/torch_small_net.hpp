// SPDX-License-Identifier: BSL-1.0
// A small network of libtorch, its training on one rank, and an optimizer that fails.
#pragma once

#include <torch/torch.h> // before doctest: both have a macro CHECK

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <joinable/interop/torch_optimizer.hpp>
#include <joinable/join/guard.hpp>
#include <support/engines.hpp>

namespace joinable_tests::small_net {

/// y = V tanh(W x + b) + c in doubles, and a layer that no pass uses.
struct SmallNetImpl : torch::nn::Module {
    SmallNetImpl()
        : first{register_module("first", torch::nn::Linear{3, 4})},
          second{register_module("second", torch::nn::Linear{4, 2})},
          unused{register_module("unused", torch::nn::Linear{2, 2})} {
        to(torch::kDouble);
        torch::NoGradGuard const no_graph;
        int k = 0;
        for (at::Tensor& parameter : parameters()) {
            auto const values = parameter.view({-1});
            for (std::int64_t i = 0; i < values.size(0); ++i) {
                values[i] = engine_start(k, static_cast<int>(i));
            }
            ++k;
        }
    }
    at::Tensor forward(at::Tensor const& inputs) {
        return second->forward(torch::tanh(first->forward(inputs)));
    }

    torch::nn::Linear first, second, unused;
};
TORCH_MODULE(SmallNet);

inline constexpr int rounds = 10;
/// Rank r of several runs out after 10 - 2 r rounds.
inline int rounds_of(int rank) {
    return rounds - 2 * rank;
}
inline at::Tensor inputs_of(int rank, int round) {
    at::Tensor const inputs = torch::zeros({2, 3}, torch::kDouble);
    for (int i = 0; i < 6; ++i) {
        inputs[i / 3][i % 3] = engine_input(100 * rank + 2 * round + i / 3, i % 3);
    }
    return inputs;
}
inline at::Tensor targets_of(int rank, int round) {
    at::Tensor const targets = torch::zeros({2, 2}, torch::kDouble);
    for (int i = 0; i < 4; ++i) {
        targets[i / 2][i % 2] = engine_target(100 * rank + 2 * round + i / 2, i % 2);
    }
    return targets;
}
inline at::Tensor loss_of(at::Tensor const& outputs, int rank, int round) {
    return (outputs - targets_of(rank, round)).pow(2).mean();
}
inline double rate_of(int round) {
    return 0.05 / (1 + round % 3);
}

inline std::vector<double> numbers_of(torch::nn::Module const& module) {
    std::vector<double> numbers;
    for (at::Tensor const& parameter : module.parameters()) {
        at::Tensor const flat = parameter.detach().contiguous();
        auto const* const data = flat.data_ptr<double>();
        numbers.insert(numbers.end(), data, data + flat.numel());
    }
    return numbers;
}
inline void check_close(
    std::vector<double> const& numbers,
    std::vector<double> const& expected,
    double tolerance = 1e-12
) {
    REQUIRE(numbers.size() == expected.size());
    for (std::size_t i = 0; i < numbers.size(); ++i) {
        CHECK(std::abs(numbers[i] - expected[i]) < tolerance);
    }
}

struct Training {
    std::vector<double> losses; ///< of rank 0's batches
    std::vector<double> values;
};
/// The loss of a step is the mean over all ranks, those without a batch having 0.
template <class Factory>
Training train_alone(
    int world, Factory const& factory, std::function<void(SmallNet&)> const& before_step = {}
) {
    SmallNet model;
    auto optimizer = factory(model->parameters());
    Training training;
    for (int round = 0; round < rounds; ++round) {
        optimizer.param_groups()[0].options().set_lr(rate_of(round));
        model->zero_grad(true);
        for (int rank = 0; rank < world && round < rounds_of(rank); ++rank) {
            at::Tensor const loss = loss_of(model->forward(inputs_of(rank, round)), rank, round);
            (loss / world).backward();
            if (rank == 0) {
                training.losses.push_back(loss.item<double>());
            }
        }
        if (before_step) {
            before_step(model);
        }
        optimizer.step();
    }
    training.values = numbers_of(*model);
    return training;
}

/// Numbers between -0.5 and 0.5.
inline at::Tensor numbers(at::IntArrayRef extents, double shift) {
    at::Tensor const all = torch::zeros(extents, torch::kDouble);
    at::Tensor const flat = all.view({-1});
    flat.copy_(torch::sin(torch::arange(flat.numel(), torch::kDouble) * 0.7 + shift) * 0.5);
    return all;
}
inline void fill(torch::nn::Module const& module) {
    torch::NoGradGuard const no_graph;
    double shift = 0;
    for (at::Tensor const& parameter : module.parameters()) {
        parameter.copy_(numbers(parameter.sizes(), ++shift));
    }
}

/// What f() throws, if it does.
template <class F>
std::string refusal(F const& f) {
    try {
        f();
    } catch (std::exception const& error) {
        return error.what();
    }
    return {};
}

struct AutogradError : std::runtime_error {
    using std::runtime_error::runtime_error;
};
/// Passes its input on, and throws in the backward pass.
struct ThrowsInBackward : torch::autograd::Function<ThrowsInBackward> {
    static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor const& x) {
        return x.clone();
    }
    static torch::autograd::variable_list
    backward(torch::autograd::AutogradContext*, torch::autograd::variable_list const&) {
        throw AutogradError{"a batch that cannot be differentiated"};
    }
};

/// Three rounds in a guard, where `loss_of_round` runs a forward pass. A batch whose backward pass
/// throws AutogradError is skipped, or ends the guard. Returns what leaves the guard.
template <class Sharded, class Loss, class... Control>
std::string
train_or_skip(Sharded& sharded, bool skips, Loss const& loss_of_round, Control const&... control) {
    return refusal([&] {
        joinable::Join guard{joinable::participants(sharded), control...};
        for (int round = 0; round < 3; ++round) {
            try {
                sharded.backward(loss_of_round(round));
            } catch (AutogradError const&) {
                if (!skips) {
                    throw;
                }
                sharded.skip();
            }
            sharded.step();
        }
        guard.finish();
    });
}

/// Runs a layer again in the backward pass, in a backward pass of its own.
struct RunsBlockAgain : torch::autograd::Function<RunsBlockAgain> {
    using Run = std::function<at::Tensor(at::Tensor const&)>;
    static at::Tensor
    forward(torch::autograd::AutogradContext* context, at::Tensor const& inputs, Run const* run) {
        context->saved_data["run"] = reinterpret_cast<std::int64_t>(run);
        context->save_for_backward({inputs});
        at::AutoGradMode const off{false};
        return (*run)(inputs);
    }
    static torch::autograd::variable_list backward(
        torch::autograd::AutogradContext* context, torch::autograd::variable_list const& gradients
    ) {
        // NOLINTNEXTLINE(performance-no-int-to-ptr): as forward() saved it
        auto const* const run = reinterpret_cast<Run const*>(context->saved_data["run"].toInt());
        at::Tensor const inputs = context->get_saved_variables()[0].detach().requires_grad_(true);
        at::AutoGradMode const on{true};
        (*run)(inputs).backward(gradients[0]);
        return {inputs.grad(), at::Tensor{}};
    }
};

/// SGD that fails in its second step on one rank.
struct FailingSgd : torch::optim::SGD {
    FailingSgd(std::vector<at::Tensor> mine, bool fails)
        : SGD{std::move(mine), torch::optim::SGDOptions{0.5}}, left{fails ? 1 : 100} {}
    at::Tensor step(LossClosure closure = nullptr) override {
        if (left-- == 0) {
            throw std::domain_error{"libtorch ran out of memory"};
        }
        return SGD::step(std::move(closure));
    }
    int left;
};

} // namespace joinable_tests::small_net

template <>
struct joinable::torch::optimizer_traits<joinable_tests::small_net::FailingSgd>
    : optimizer_traits<::torch::optim::SGD> {};
