// SPDX-License-Identifier: BSL-1.0
// SyncBatchNorm against libtorch's own BatchNorm on the union of all ranks' batches.
#include <joinable/interop/torch_sync_batch_norm.hpp>

#include <torch/torch.h> // before doctest: both have a macro CHECK

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <support/process_ranks.hpp>
#include <support/ranks.hpp>

#include <joinable/communicator/collectives.hpp>
#include <joinable/communicator/self.hpp>
#include <joinable/interop/torch.hpp>
#include <joinable/join/guard.hpp>

namespace {

using joinable::ContractViolation;
using joinable::ThreadCommunicator;
using joinable_tests::run_process_ranks;
using joinable_tests::run_ranks;
using torch::Tensor;
using torch::nn::BatchNormOptions;

double distance(Tensor const& a, Tensor const& b) {
    REQUIRE(a.sizes() == b.sizes());
    return a.numel() == 0 ? 0 : (a - b).abs().max().item<double>();
}

/// Numbers that differ everywhere, of a few samples; as on all machines.
Tensor numbers(std::vector<std::int64_t> const& extents, int first) {
    std::int64_t count = 1;
    for (std::int64_t const extent : extents) {
        count *= extent;
    }
    Tensor const indices = torch::arange(count, torch::kDouble) + 1000.0 * first;
    return (torch::sin(indices * 1.7) * 3 + torch::cos(indices * 0.31)).view(extents);
}

/// Batches of 2, 0, 3, 1, 2, ... samples: one rank has none.
std::int64_t samples_of(int rank) {
    return rank % 4 == 1 ? 0 : 2 + (rank % 4 == 2 ? 1 : rank % 4 == 3 ? -1 : 0);
}

void prepare(torch::nn::Module& module) {
    module.to(torch::kDouble);
    torch::NoGradGuard const no_graph;
    for (Tensor& parameter : module.parameters()) {
        parameter.copy_(numbers(parameter.sizes().vec(), 7));
    }
}

template <class BatchNorm>
void check_layer(
    ThreadCommunicator& comm, BatchNormOptions const& options, std::vector<std::int64_t> others
) {
    auto hidden = joinable::shadowed(comm);
    joinable::torch::SyncBatchNorm norm{hidden, options};
    BatchNorm whole{options};
    prepare(*norm);
    prepare(*whole);
    for (int round = 0; round < 3; ++round) {
        std::vector<Tensor> batches;
        std::vector<Tensor> slopes;
        std::int64_t begin = 0;
        for (int rank = 0; rank < comm.size(); ++rank) {
            std::vector<std::int64_t> extents{samples_of(rank), options.num_features()};
            extents.insert(extents.end(), others.begin(), others.end());
            batches.push_back(numbers(extents, 10 * rank + round));
            slopes.push_back(numbers(extents, 500 + 10 * rank + round));
            begin += rank < comm.rank() ? samples_of(rank) : 0;
        }
        Tensor const all = torch::cat(batches).requires_grad_();
        Tensor const mine = batches[static_cast<std::size_t>(comm.rank())].clone().requires_grad_();
        norm->zero_grad();
        whole->zero_grad();
        Tensor const expected = whole->forward(all);
        (expected * torch::cat(slopes)).sum().backward();
        Tensor const outputs = norm->forward(mine);
        (outputs * slopes[static_cast<std::size_t>(comm.rank())]).sum().backward();

        std::int64_t const count = samples_of(comm.rank());
        CHECK(distance(outputs, expected.narrow(0, begin, count)) < 1e-12);
        CHECK(distance(mine.grad(), all.grad().narrow(0, begin, count)) < 1e-11);
        if (options.affine()) {
            for (auto const& [sum, whole_gradient] :
                 {std::pair{norm->weight.grad().clone(), whole->weight.grad()},
                  std::pair{norm->bias.grad().clone(), whole->bias.grad()}}) {
                joinable::all_reduce(comm, sum).wait();
                CHECK(distance(sum, whole_gradient) < 1e-11);
            }
        }
        if (options.track_running_stats()) {
            CHECK(distance(norm->running_mean, whole->running_mean) < 1e-12);
            CHECK(distance(norm->running_var, whole->running_var) < 1e-12);
            CHECK(norm->num_batches_tracked.template item<std::int64_t>() == round + 1);
        }
    }
    norm->eval();
    whole->eval();
    std::vector<std::int64_t> extents{4, options.num_features()};
    extents.insert(extents.end(), others.begin(), others.end());
    Tensor const batch = numbers(extents, 3);
    if (comm.rank() == 0) { // not collective
        CHECK(distance(norm->forward(batch), whole->forward(batch)) < 1e-12);
    }
}

TEST_CASE("SyncBatchNorm is libtorch's BatchNorm of the union of all ranks' batches") {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        check_layer<torch::nn::BatchNorm1d>(comm, BatchNormOptions{3}, {});
        check_layer<torch::nn::BatchNorm1d>(comm, BatchNormOptions{2}.eps(0.1).momentum(0.3), {5});
        check_layer<torch::nn::BatchNorm2d>(comm, BatchNormOptions{3}, {2, 4});
        check_layer<torch::nn::BatchNorm2d>(comm, BatchNormOptions{3}.affine(false), {2, 4});
        check_layer<torch::nn::BatchNorm2d>(
            comm, BatchNormOptions{2}.momentum(c10::nullopt), {3, 1}
        );
        check_layer<torch::nn::BatchNorm3d>(
            comm, BatchNormOptions{2}.track_running_stats(false), {2, 1, 2}
        );
    });
}

TEST_CASE("SyncBatchNorm of single and half precision has its statistics in double precision") {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        joinable::torch::SyncBatchNorm norm{comm, BatchNormOptions{3}};
        torch::nn::BatchNorm2d whole{BatchNormOptions{3}};
        std::vector<Tensor> batches;
        for (int rank = 0; rank < comm.size(); ++rank) {
            batches.push_back(numbers({2, 3, 2, 2}, rank).to(torch::kFloat) + 100);
        }
        Tensor const mine = batches[static_cast<std::size_t>(comm.rank())];
        Tensor const expected = whole->forward(torch::cat(batches)).narrow(0, 2 * comm.rank(), 2);
        Tensor const single = norm->forward(mine);
        CHECK((single.scalar_type() == torch::kFloat));
        CHECK(distance(single, expected) < 1e-4);
        Tensor const half = norm->forward(mine.to(torch::kBFloat16).requires_grad_());
        CHECK((half.scalar_type() == torch::kBFloat16));
        half.sum().backward();
        CHECK(norm->weight.grad().isfinite().all().item<bool>());
    });
}

TEST_CASE("SyncBatchNorm refuses what has no variance, no channels or a second derivative") {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        joinable::torch::SyncBatchNorm norm{comm, BatchNormOptions{3}};
        Tensor const single = torch::ones({comm.rank() == 0 ? 1 : 0, 3});
        CHECK_THROWS_AS(norm->forward(single), ContractViolation);
        CHECK_THROWS_WITH(
            norm->forward(torch::ones({4, 2})),
            "SyncBatchNorm of 3 channels needs an input whose second dimension is the channels"
        );
        Tensor const input = numbers({4, 3}, comm.rank()).to(torch::kFloat).requires_grad_();
        Tensor const loss = norm->forward(input).pow(2).sum();
        CHECK_THROWS_WITH(
            torch::autograd::grad({loss}, {input}, {}, true, true),
            doctest::Contains("no second derivatives")
        );
    });
}

TEST_CASE("a clone of a model with SyncBatchNorm trains alike and has tensors of its own") {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        torch::nn::Sequential model{
            joinable::torch::SyncBatchNorm{comm, BatchNormOptions{3}.eps(0.1)},
            joinable::torch::SyncBatchNorm{comm, BatchNormOptions{3}.affine(false)}
        };
        prepare(*model);
        Tensor const first = numbers({4, 3}, comm.rank());
        model->forward(first);
        torch::nn::Sequential copy{
            std::dynamic_pointer_cast<torch::nn::SequentialImpl>(model->clone())
        };
        std::vector<Tensor> const buffers = model->buffers();
        REQUIRE(buffers.size() == 6);
        REQUIRE(copy->parameters().size() == 2);
        std::vector<Tensor> before;
        for (std::size_t i = 0; i < buffers.size(); ++i) {
            CHECK(distance(copy->buffers()[i], buffers[i]) == 0);
            before.push_back(buffers[i].clone());
        }
        Tensor const second = numbers({2 + comm.rank() % 2, 3}, 50 + comm.rank());
        Tensor const outputs = copy->forward(second);
        outputs.pow(3).sum().backward();
        for (std::size_t i = 0; i < buffers.size(); ++i) {
            CHECK(distance(buffers[i], before[i]) == 0);
            CHECK(distance(copy->buffers()[i], before[i]) != 0);
        }
        Tensor const expected = model->forward(second);
        expected.pow(3).sum().backward();
        CHECK(distance(outputs, expected) == 0);
        for (std::size_t i = 0; i < 2; ++i) {
            CHECK(distance(copy->parameters()[i].grad(), model->parameters()[i].grad()) == 0);
        }
        for (std::size_t i = 0; i < buffers.size(); ++i) {
            CHECK(distance(copy->buffers()[i], buffers[i]) == 0);
        }
    });
}

// ---- training

/// The layer comes twice; in one process it is libtorch's.
template <class Norm>
struct NetImpl : torch::nn::Module {
    explicit NetImpl(Norm first_norm, Norm second_norm)
        : first{register_module("first", torch::nn::Conv1d{torch::nn::Conv1dOptions{2, 3, 2}})},
          one{register_module("one", first_norm)},
          second{register_module("second", torch::nn::Conv1d{torch::nn::Conv1dOptions{3, 2, 2}})},
          two{register_module("two", second_norm)} {
        prepare(*this);
    }
    Tensor forward(Tensor const& inputs) {
        Tensor const inner = torch::tanh(one->forward(first->forward(inputs)));
        return two->forward(second->forward(inner));
    }
    torch::nn::Conv1d first;
    Norm one;
    torch::nn::Conv1d second;
    Norm two;
};

std::size_t inputs_of(int rank, int world) {
    return world > 1 && rank == 1 ? 0 : 2 + static_cast<std::size_t>(3 * rank % 4);
}
Tensor batch_of(int rank, std::size_t round) {
    int const input = static_cast<int>(round);
    return numbers({1 + (rank + input) % 3, 2, 5}, 20 * rank + input);
}
Tensor loss_of(Tensor const& outputs, Tensor const& inputs) {
    return (outputs - inputs.narrow(2, 1, 3) * 0.5).pow(2).sum(); // of samples
}
constexpr double rate = 0.02;
auto const sgd = torch::optim::SGDOptions{rate}.momentum(0.9);

std::vector<Tensor> state_of(torch::nn::Module const& model) {
    std::vector<Tensor> state;
    for (Tensor const& parameter : model.parameters()) {
        state.push_back(parameter.detach().clone());
    }
    for (Tensor const& buffer : model.buffers()) {
        state.push_back(buffer.detach().clone());
    }
    return state;
}

std::vector<Tensor> train_alone(int world) {
    using Norm = torch::nn::BatchNorm1d;
    NetImpl<Norm> model{Norm{BatchNormOptions{3}}, Norm{BatchNormOptions{2}}};
    torch::optim::SGD optimizer{model.parameters(), sgd};
    for (std::size_t round = 0;; ++round) {
        std::vector<Tensor> batches;
        for (int rank = 0; rank < world; ++rank) {
            if (round < inputs_of(rank, world)) {
                batches.push_back(batch_of(rank, round));
            }
        }
        if (batches.empty()) {
            return state_of(model);
        }
        Tensor const all = torch::cat(batches);
        model.zero_grad();
        (loss_of(model.forward(all), all) / all.size(0)).backward();
        optimizer.step();
    }
}

template <class Comm>
void train_together(Comm& comm) {
    using Norm = joinable::torch::SyncBatchNorm;
    auto hidden = joinable::shadowed(comm);
    NetImpl<Norm> model{Norm{hidden, BatchNormOptions{3}}, Norm{hidden, BatchNormOptions{2}}};
    torch::optim::SGD optimizer{model.parameters(), sgd};
    joinable::torch::DistributedDataParallel ddp{
        comm, model, {.gradient_kind = joinable::GradientKind::sum}
    };
    ddp.attach_collectives(hidden);
    joinable::torch::Step step{comm, optimizer};
    {
        joinable::Join guard{joinable::participants(ddp, step)};
        for (std::size_t round = 0; round < inputs_of(comm.rank(), comm.size()); ++round) {
            Tensor const inputs = batch_of(comm.rank(), round);
            { // an evaluation, in which the layers do not communicate
                torch::NoGradGuard const no_graph;
                model.eval();
                (void)ddp.forward(inputs);
                model.train();
            }
            model.zero_grad();
            Tensor const outputs =
                ddp.forward({.weight = static_cast<std::uint64_t>(inputs.size(0))}, inputs);
            loss_of(outputs, inputs).backward();
            step.step();
        }
        guard.finish();
    }
    auto const state = state_of(model);
    auto const expected = train_alone(comm.size());
    REQUIRE(state.size() == expected.size());
    for (std::size_t i = 0; i < state.size(); ++i) {
        CAPTURE(i);
        CHECK(distance(state[i], expected[i]) < 1e-11);
    }
}

TEST_CASE("SyncBatchNorm refuses an input on a device whose memory its communicator does not move"
) {
    joinable::SelfCommunicator comm;
    joinable::torch::SyncBatchNorm norm{comm, BatchNormOptions{3}};
    CHECK_THROWS_WITH_AS(
        norm->forward(torch::zeros({4, 3}, torch::kMeta)),
        doctest::Contains("a torch::Tensor is on meta"),
        ContractViolation
    );
}

TEST_CASE("a model with SyncBatchNorm trains on uneven inputs as one process does on their union") {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& comm) { train_together(comm); });
    run_process_ranks(
        {1, 2, 3, 4},
        [](joinable::ProcessCommunicator& comm) {
            at::set_num_threads(1); // a child of a process that has a pool has none
            train_together(comm);
        },
        {.other_threads = true}
    ); // of a BLAS, which starts its own again in a forked process
}

} // namespace
