// SPDX-License-Identifier: BSL-1.0
#include <joinable/interop/torch.hpp>

#include <torch/torch.h> // before doctest: both have a macro CHECK

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <future>
#include <initializer_list>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>
#include <unistd.h>

#include <support/engines.hpp>
#include <support/process_ranks.hpp>
#include <support/ranks.hpp>
#include <support/torch_small_net.hpp>
#include <support/wait_until.hpp>

#include <joinable/communicator/collectives.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/zero.hpp>

namespace {

using joinable::ContractViolation;
using joinable::DataParallelOptions;
using joinable::DType;
using joinable::JoinedGradients;
using joinable::Shape;
using joinable::ThreadCommunicator;
using joinable_tests::engine_input;
using joinable_tests::engine_start;
using joinable_tests::engine_target;
using joinable_tests::run_process_ranks;
using joinable_tests::run_ranks;
using joinable_tests::small_net::RunsBlockAgain;
using torch::Tensor;

static_assert(joinable::models_tensor<Tensor>() && joinable::WritableTensor<Tensor const>);
static_assert(joinable::models_parameter<Tensor>());

// ---- tensors

TEST_CASE("a torch tensor has the dtype, extents and strides that torch gives it") {
    auto const view = [](Tensor const& t) { return joinable::AnyView{t}; };
    CHECK(view(torch::zeros({2, 3})).dtype() == DType::f32);
    CHECK(view(torch::zeros({2}, torch::kDouble)).dtype() == DType::f64);
    CHECK(view(torch::zeros({2}, torch::kHalf)).dtype() == DType::f16);
    CHECK(view(torch::zeros({2}, torch::kBFloat16)).dtype() == DType::bf16);
    CHECK(view(torch::zeros({2}, torch::kChar)).dtype() == DType::i8);
    CHECK(view(torch::zeros({2}, torch::kByte)).dtype() == DType::u8);
    CHECK(view(torch::zeros({2}, torch::kBool)).dtype() == DType::boolean);
    CHECK(view(torch::zeros({2}, torch::kShort)).dtype() == DType::i16);
    CHECK(view(torch::zeros({2}, torch::kInt)).dtype() == DType::i32);
    CHECK(view(torch::zeros({2}, torch::kLong)).dtype() == DType::i64);
    CHECK(view(torch::zeros({2}, torch::kComplexFloat)).dtype() == DType::c64);
    CHECK(view(torch::zeros({2}, torch::kComplexDouble)).dtype() == DType::c128);
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 3)
    CHECK(view(torch::empty({2}, torch::kUInt16)).dtype() == DType::u16);
    CHECK(view(torch::empty({2}, torch::kUInt32)).dtype() == DType::u32);
    CHECK(view(torch::empty({2}, torch::kUInt64)).dtype() == DType::u64);
#endif
    Tensor const scalar = torch::tensor(3.0);
    CHECK((view(scalar).numel() == 1 && view(scalar).extents() == Shape{}));
    Tensor const image = torch::zeros({2, 3, 4, 5}).contiguous(torch::MemoryFormat::ChannelsLast);
    CHECK(view(image).strides() == Shape{60, 1, 15, 3});
    Tensor const part = torch::arange(12).reshape({3, 4}).t().narrow(0, 1, 2);
    CHECK((view(part).extents() == Shape{2, 3} && view(part).strides() == Shape{1, 4}));
    CHECK(view(part).data() == part.data_ptr());
    CHECK(view(part).device() == joinable::DeviceId{});
}

TEST_CASE("a torch tensor whose elements cannot be read as they lie is refused") {
    Tensor const floats = torch::ones({2, 2});
    for (Tensor const& refused :
         {Tensor{},
          floats.to_sparse(),
          torch::imag(torch::complex(floats, floats).conj()), // a view that negates
          torch::empty({2}, torch::kComplexHalf),
          torch::zeros({2}, torch::TensorOptions{torch::kMeta})}) {
        CHECK_THROWS_AS((void)joinable::AnyView{refused}, ContractViolation);
    }
    auto const refused_by_name = [](c10::ScalarType type, std::string const& name) {
        CHECK_THROWS_WITH_AS(
            (void)joinable::AnyView{torch::empty({2}, type)},
            ("a torch::Tensor has elements of type " + name +
             ", which this adapter does not take; convert it with to(torch::kFloat) or the like")
                .c_str(),
            ContractViolation
        );
    };
    refused_by_name(torch::kComplexHalf, "ComplexHalf");
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 3)
    refused_by_name(torch::kFloat8_e5m2, "Float8_e5m2");
    refused_by_name(torch::kFloat8_e4m3fn, "Float8_e4m3fn");
#endif
}

TEST_CASE("collectives take torch tensors, and refuse those with gaps") {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        Tensor tensor = torch::full({2, 3}, comm.rank() + 1, torch::kDouble);
        joinable::all_reduce(comm, tensor).wait();
        CHECK(tensor.eq(comm.size() * (comm.size() + 1) / 2).all().item<bool>());
        CHECK_THROWS_AS(joinable::all_reduce(comm, tensor.t()).wait(), ContractViolation);
    });
}

TEST_CASE("tensors of bools have no sum, but other reductions, and travel") {
    run_ranks({1, 2, 3}, [](ThreadCommunicator& comm) {
        using joinable::ReduceOp;
        std::vector<Tensor> const flags(
            static_cast<std::size_t>(comm.size()), torch::full({2}, comm.rank() == 0, torch::kBool)
        );
        Tensor flag = flags[0].clone();
        Tensor const all = torch::zeros({2 * comm.size()}, torch::kBool);
        char const* const text =
            "a reduction of booleans is min, max, bit_and or bit_or, but was given sum of boolean; convert the "
            "elements to i32 to count them";
        CHECK_THROWS_WITH_AS(joinable::all_reduce(comm, flag).wait(), text, ContractViolation);
        CHECK_THROWS_WITH_AS(
            joinable::reduce(comm, flag, ReduceOp::sum, 0).wait(), text, ContractViolation
        );
        CHECK_THROWS_WITH_AS(
            joinable::reduce_scatter(comm, all, flag).wait(), text, ContractViolation
        );
        joinable::all_reduce(comm, flag, ReduceOp::bit_or).wait();
        CHECK(flag.all().item<bool>());
        flag = flags[0].clone();
        joinable::all_reduce(comm, flag, ReduceOp::min).wait();
        CHECK(flag.any().item<bool>() == (comm.size() == 1));
        joinable::all_gather(comm, flags[0], all).wait();
        CHECK(all.sum().item<int>() == 2);
        joinable::broadcast(comm, flag = flags[0].clone(), 0).wait();
        CHECK(flag.all().item<bool>());
    });
}

// ---- training

/// y = V tanh(W x + b) + c in doubles, and a branch that only some passes take.
struct NetImpl : torch::nn::Module {
    NetImpl()
        : first{register_module("first", torch::nn::Linear{3, 4})},
          second{register_module("second", torch::nn::Linear{4, 2})},
          branch{register_module("branch", torch::nn::Linear{3, 2})} {
        to(torch::kDouble);
        torch::NoGradGuard const no_graph;
        int k = 0;
        for (Tensor& parameter : parameters()) {
            auto const values = parameter.view({-1});
            for (std::int64_t i = 0; i < values.size(0); ++i) {
                values[i] = engine_start(k, static_cast<int>(i));
            }
            ++k;
        }
    }
    Tensor forward(Tensor const& inputs, bool takes_branch = false) {
        Tensor const outputs = second->forward(torch::tanh(first->forward(inputs)));
        return takes_branch ? outputs + branch->forward(inputs) : outputs;
    }
    /// All but the branch.
    void freeze_branch() {
        for (Tensor& parameter : branch->parameters()) {
            parameter.requires_grad_(false);
        }
    }

    torch::nn::Linear first, second, branch;
};
TORCH_MODULE(Net);

struct Batch {
    explicit Batch(std::vector<int> const& samples)
        : inputs{torch::zeros({static_cast<std::int64_t>(samples.size()), 3}, torch::kDouble)},
          targets{torch::zeros({static_cast<std::int64_t>(samples.size()), 2}, torch::kDouble)} {
        for (std::size_t i = 0; i < samples.size(); ++i) {
            for (int k = 0; k < 3; ++k) {
                inputs[static_cast<std::int64_t>(i)][k] = engine_input(samples[i], k);
            }
            for (int k = 0; k < 2; ++k) {
                targets[static_cast<std::int64_t>(i)][k] = engine_target(samples[i], k);
            }
        }
    }
    [[nodiscard]] std::int64_t size() const { return inputs.size(0); }

    Tensor inputs, targets;
};

Tensor loss_of(Tensor const& outputs, Batch const& batch) {
    return (outputs - batch.targets).pow(2).sum() / (2 * batch.size());
}

std::vector<std::vector<int>> batches_of(int rank, int world) {
    std::vector<std::vector<int>> batches;
    int sample = 100 * rank;
    int const count = world > 1 && rank == 1 ? 0 : 2 + rank % 3;
    for (int b = 0; b < count; ++b) {
        std::vector<int>& batch = batches.emplace_back();
        for (int i = 0; i <= (rank + 2 * b) % 5; ++i) {
            batch.push_back(sample++);
        }
    }
    return batches;
}
/// The samples of all ranks in a round.
std::vector<int> union_of_round(std::size_t round, int world) {
    std::vector<int> samples;
    for (int rank = 0; rank < world; ++rank) {
        auto const batches = batches_of(rank, world);
        if (round < batches.size()) {
            samples.insert(samples.end(), batches[round].begin(), batches[round].end());
        }
    }
    return samples;
}

std::vector<double> numbers_of(torch::nn::Module const& module) {
    std::vector<double> numbers;
    for (Tensor const& parameter : module.parameters()) {
        Tensor const flat = parameter.detach().contiguous();
        auto const* const data = flat.data_ptr<double>();
        numbers.insert(numbers.end(), data, data + flat.numel());
    }
    return numbers;
}
void check_close(std::vector<double> const& numbers, std::vector<double> const& expected) {
    REQUIRE(numbers.size() == expected.size());
    for (std::size_t i = 0; i < numbers.size(); ++i) {
        CHECK(std::abs(numbers[i] - expected[i]) < 1e-12);
    }
}

auto const sgd = torch::optim::SGDOptions{0.1}.momentum(0.9);

/// What one process makes of the union of the batches.
std::vector<double> train_alone(int world) {
    Net model;
    model->freeze_branch();
    torch::optim::SGD optimizer{model->parameters(), sgd};
    for (std::size_t round = 0;; ++round) {
        auto const samples = union_of_round(round, world);
        if (samples.empty()) {
            return numbers_of(*model);
        }
        Batch const batch{samples};
        model->zero_grad();
        loss_of(model->forward(batch.inputs), batch).backward();
        optimizer.step();
    }
}

template <class Comm>
void train_together(Comm& comm, DataParallelOptions options, bool to_none) {
    Net model;
    model->freeze_branch();
    if (comm.rank() != 0) {
        torch::NoGradGuard const no_graph;
        model->first->weight.mul_(2);
    }
    torch::optim::SGD optimizer{model->parameters(), sgd};
    options.sync_at_end =
        false; // so that each rank ends with what its own steps made of its values
    joinable::torch::DistributedDataParallel ddp{comm, model, options};
    joinable::torch::Step step{comm, optimizer};
    check_close(numbers_of(*model), numbers_of(*Net{}));
    {
        joinable::Join guard{joinable::participants(ddp, step)};
        for (auto const& samples : batches_of(comm.rank(), comm.size())) {
            Batch const batch{samples};
            model->zero_grad(to_none);
            auto const outputs = ddp.forward({.weight = batch.size()}, batch.inputs);
            loss_of(outputs, batch).backward();
            step.step();
        }
        guard.finish();
    }
    check_close(numbers_of(*model), train_alone(comm.size()));
}

TEST_CASE("a libtorch module trains on uneven inputs as one process does on their union") {
    for (bool const views : {false, true}) {
        for (bool const to_none : {false, true}) {
            CAPTURE(views);
            CAPTURE(to_none);
            DataParallelOptions const options{
                .first_bucket_bytes = 64, .gradient_as_bucket_view = views
            };
            run_ranks({1, 2, 3, 4, 8}, [&](ThreadCommunicator& comm) {
                train_together(comm, options, to_none);
            });
            run_process_ranks(
                {3},
                [&](joinable::ProcessCommunicator& comm) {
                    train_together(comm, options, to_none);
                },
                {.other_threads = true}
            ); // of a BLAS, which starts its own again in a forked process
        }
    }
}

TEST_CASE("Adam of joinable, sharded, steps libtorch's parameters as libtorch's Adam does") {
    auto const settings = torch::optim::AdamOptions{0.05}.weight_decay(0.01);
    run_ranks({1, 2, 3, 4, 8}, [&](ThreadCommunicator& comm) {
        Net alone;
        torch::optim::Adam adam{alone->parameters(), settings};
        Net model;
        joinable::torch::DistributedDataParallel ddp{comm, model, {.find_unused = true}};
        joinable::ZeroRedundancyOptimizer zero{
            comm, model->parameters(), joinable::Adam{.learning_rate = 0.05, .weight_decay = 0.01}
        };
        joinable::Join guard{joinable::participants(ddp, zero)};
        for (auto const& samples : batches_of(comm.rank(), comm.size())) {
            Batch const batch{samples};
            model->zero_grad();
            auto const outputs = ddp.forward({.weight = batch.size()}, batch.inputs);
            loss_of(outputs, batch).backward();
            zero.step();
        }
        guard.finish();
        for (std::size_t round = 0;; ++round) {
            auto const samples = union_of_round(round, comm.size());
            if (samples.empty()) {
                break;
            }
            Batch const batch{samples};
            adam.zero_grad();
            loss_of(alone->forward(batch.inputs), batch).backward();
            adam.step();
        }
        auto const numbers = numbers_of(*model);
        auto const expected = numbers_of(*alone);
        for (std::size_t i = 0; i < numbers.size(); ++i) {
            CHECK(std::abs(numbers[i] - expected[i]) < 1e-9);
        }
    });
}

TEST_CASE("a training goes on from what one rank has written by torch::save") {
    auto const train = [](ThreadCommunicator& comm, Net& model, torch::optim::SGD& optimizer) {
        joinable::torch::DistributedDataParallel ddp{comm, model, {.find_unused = true}};
        joinable::torch::Step step{comm, optimizer};
        joinable::Join guard{joinable::participants(ddp, step)};
        for (auto const& samples : batches_of(comm.rank(), comm.size())) {
            Batch const batch{samples};
            optimizer.zero_grad();
            loss_of(ddp.forward({.weight = batch.size()}, batch.inputs), batch).backward();
            step.step();
        }
        guard.finish();
    };
    std::string saved_model;
    std::string saved_optimizer;
    run_ranks({1, 2, 3, 4, 8}, [&](ThreadCommunicator& comm) {
        Net model;
        torch::optim::SGD optimizer{model->parameters(), sgd};
        train(comm, model, optimizer);
        if (comm.rank() == comm.size() - 1) { // one that may have run out before others
            std::ostringstream of_model;
            std::ostringstream of_optimizer;
            torch::save(model, of_model);
            torch::save(optimizer, of_optimizer);
            saved_model = of_model.str();
            saved_optimizer = of_optimizer.str();
        }
        comm.barrier();
        Net resumed;
        torch::optim::SGD resumed_optimizer{resumed->parameters(), sgd};
        std::istringstream of_model{saved_model};
        std::istringstream of_optimizer{saved_optimizer};
        torch::load(resumed, of_model);
        torch::load(resumed_optimizer, of_optimizer);
        check_close(numbers_of(*resumed), numbers_of(*model));
        train(comm, model, optimizer);
        train(comm, resumed, resumed_optimizer);
        CHECK(numbers_of(*resumed) == numbers_of(*model));
    });
}

TEST_CASE("parameters that the outputs do not use are found in the graph") {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        Net model;
        joinable::torch::DistributedDataParallel ddp{comm, model, {.find_unused = true}};
        Batch const batch{{comm.rank()}};
        auto const gradient = [&] { return model->branch->bias.grad(); };
        loss_of(ddp.forward(batch.inputs), batch).backward();
        CHECK(!gradient().defined()); // nobody used it
        CHECK(model->first->bias.grad().defined());

        bool const mine = comm.rank() == comm.size() - 1;
        model->zero_grad(true);
        Tensor const outputs = ddp.forward(batch.inputs, mine);
        loss_of(outputs, batch).backward();
        Net other;
        Batch const last{{comm.size() - 1}};
        loss_of(other->forward(last.inputs, true), last).backward();
        REQUIRE(gradient().defined());
        CHECK(
            (gradient() * comm.size() - other->branch->bias.grad()).abs().max().item<double>() <
            1e-12
        );

        // A rank whose outputs use none of them.
        model->zero_grad(true);
        Tensor const leaf =
            torch::ones({1, 2}, torch::TensorOptions{torch::kDouble}.requires_grad(true));
        bool const none = comm.size() > 1 && comm.rank() == 0;
        auto const some =
            ddp.forward([&] { return none ? leaf * 2 : model->forward(batch.inputs); });
        some.sum().backward();
        CHECK(model->first->bias.grad().defined());
    });
}

TEST_CASE("rounds in no_sync() accumulate, and the next one averages the sum") {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        Net model, alone;
        model->freeze_branch();
        joinable::torch::DistributedDataParallel ddp{comm, model};
        for (int round = 0; round < 2; ++round) {
            auto const backward = [&](int sample) {
                Batch const batch{{sample + comm.rank()}};
                loss_of(ddp.forward(batch.inputs), batch).backward();
            };
            model->zero_grad();
            alone->zero_grad();
            {
                auto const local = ddp.no_sync();
                backward(10);
                backward(20);
            }
            backward(30);
            for (int rank = 0; rank < comm.size(); ++rank) {
                for (int const sample : {10, 20, 30}) {
                    Batch const batch{{sample + rank}};
                    loss_of(alone->forward(batch.inputs), batch).backward();
                }
            }
            Tensor const sum = alone->first->weight.grad() / comm.size();
            CHECK((model->first->weight.grad() - sum).abs().max().item<double>() < 1e-12);
        }
    });
}

TEST_CASE("a module that was converted or unfrozen after it was wrapped is refused by name") {
    run_ranks({1, 2, 3}, [](ThreadCommunicator& comm) {
        auto const text_after = [&](std::function<void(Net&)> const& change) {
            Net model;
            model->freeze_branch();
            joinable::torch::DistributedDataParallel ddp{comm, model};
            Batch const batch{{1, 2}};
            try {
                joinable::Join guard{joinable::participants(ddp)};
                loss_of(ddp.forward(batch.inputs), batch).backward();
                change(model);
                loss_of(ddp.forward(batch.inputs), batch).backward();
                guard.finish();
            } catch (ContractViolation const& error) {
                return std::string{error.what()};
            }
            return std::string{};
        };
        CHECK(text_after([](Net& model) {
                  model->to(torch::kFloat);
              }).find(" now, but was f64 (") != std::string::npos);
        CHECK(text_after([](Net& model) { model->to(torch::kFloat); }
        ).ends_with("make the DistributedDataParallel after to(), or call refresh()"));
        CHECK(text_after([](Net& model) { model->branch->bias.set_requires_grad(true); }
        ).starts_with("parameter "));
        CHECK(text_after([](Net& model) {
                  model->first->bias.set_requires_grad(false);
              }).find("are frozen now") != std::string::npos);
    });
}

TEST_CASE("a module that was converted and back, on all ranks or on one, is refused by name on all"
) {
    run_ranks({1, 2, 3}, [](ThreadCommunicator& all) {
        for (bool const in_guard : {true, false}) {
            for (bool const on_one : {false, true}) {
                CAPTURE(in_guard);
                CAPTURE(on_one);
                ThreadCommunicator comm = all.split(0, all.rank());
                Net model;
                model->freeze_branch();
                joinable::torch::DistributedDataParallel ddp{comm, model};
                if (!on_one || comm.rank() == comm.size() - 1) {
                    model->to(torch::kFloat);
                    model->to(torch::kDouble);
                }
                Batch const batch{{1, 2}};
                auto const train = [&] { loss_of(ddp.forward(batch.inputs), batch).backward(); };
                std::string text;
                try {
                    if (in_guard) {
                        joinable::Join guard{joinable::participants(ddp)};
                        train();
                        guard.finish();
                    } else {
                        train();
                    }
                } catch (std::exception const& error) {
                    text = error.what();
                }
                CAPTURE(text);
                CHECK(
                    text.find(
                        "parameter first.weight was set anew, by to() and back or by torch::load(), after the "
                        "DistributedDataParallel was made, so its gradient would not be averaged; make the "
                        "DistributedDataParallel after that, or call refresh()"
                    ) != std::string::npos
                );
            }
        }
    });
}

TEST_CASE("a layer that a module got after it was wrapped is refused by name where a guard begins"
) {
    run_ranks({1, 2, 3}, [](ThreadCommunicator& comm) {
        auto const options = torch::nn::LinearOptions(2, 2).bias(false);
        torch::nn::Sequential model{torch::nn::Linear{options}};
        joinable::torch::DistributedDataParallel ddp{comm, model};
        auto const epoch = [&] {
            joinable::Join guard{joinable::participants(ddp)};
            for (int i = 0; i <= comm.rank(); ++i) {
                ddp.forward(torch::ones({1, 2})).sum().backward();
            }
            guard.finish();
        };
        epoch();
        if (comm.rank() == comm.size() - 1) {
            model->push_back(torch::nn::Linear{options});
        }
        std::string text;
        try {
            epoch();
        } catch (std::exception const& error) {
            text = error.what();
        }
        CAPTURE(text);
        CHECK(text.find("parameter 1.weight came into the module after the") != std::string::npos);
        CHECK(
            text.find(
                "make the DistributedDataParallel after the module has all its layers, or call refresh()"
            ) != std::string::npos
        );
    });
}

TEST_CASE("a forward pass without a graph is an evaluation") {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        Net model;
        model->freeze_branch();
        joinable::torch::DistributedDataParallel ddp{comm, model};
        Batch const batch{{1, 2}};
        joinable::Join guard{joinable::participants(ddp)};
        for (int i = 0; i <= comm.rank(); ++i) {
            {
                torch::NoGradGuard const no_graph;
                CHECK(!ddp.forward(batch.inputs).requires_grad());
            }
            loss_of(ddp.forward(batch.inputs), batch).backward();
        }
        CHECK(guard.finish().rounds == 2 * static_cast<std::size_t>(comm.size()));
    });
}

TEST_CASE(
    "buffers of BatchNorm are the same on all ranks at the end, and tied weights are averaged once"
) {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        torch::nn::Linear tied{3, 3};
        torch::nn::Sequential model{tied, torch::nn::BatchNorm1d{3}, tied, torch::nn::Linear{3, 1}};
        joinable::torch::DistributedDataParallel ddp{comm, model};
        joinable::Join guard{joinable::participants(ddp)};
        for (int i = 0; i <= comm.rank(); ++i) {
            model->zero_grad();
            ddp.forward(torch::randn({4, 3})).pow(2).mean().backward();
        }
        guard.finish();
        for (auto const& tensors : {model->buffers(), model->parameters()}) {
            for (Tensor const& tensor : tensors) {
                auto const own = tensor.detach().to(torch::kDouble).sum();
                auto first = own.clone();
                joinable::broadcast(comm, first, 0).wait();
                CHECK(own.item<double>() == first.item<double>());
            }
        }
        CHECK(model->buffers()[2].item<std::int64_t>() == comm.size()); // num_batches_tracked
    });
}

TEST_CASE("gradients outlive the buckets that they lived in") {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        Net model;
        Batch const batch{{comm.rank()}};
        Tensor loss;
        {
            joinable::torch::DistributedDataParallel ddp{
                comm, model, {.gradient_as_bucket_view = true}
            };
            loss = loss_of(ddp.forward(batch.inputs, true), batch);
            loss.backward({}, true);
        }
        Tensor const before = model->first->weight.grad().clone();
        loss.backward(); // nobody listens any more
        CHECK((model->first->weight.grad() - before).abs().max().item<double>() > 1e-6);
    });
}

TEST_CASE("handles and views of gradients outlive the buckets, as PyTorch's do") {
    run_ranks({1, 2}, [](ThreadCommunicator& comm) {
        Net model;
        Batch const batch{{comm.rank()}};
        Tensor kept;
        Tensor part;
        Tensor replaced;
        {
            joinable::torch::DistributedDataParallel ddp{
                comm, model, {.gradient_as_bucket_view = true}
            };
            loss_of(ddp.forward(batch.inputs, true), batch).backward();
            replaced = model->branch->weight.grad(); // zero_grad() takes it from the parameter
            model->branch->weight.mutable_grad().reset();
            kept = model->first->weight.grad();
            part = kept.flatten().slice(0, 1, 3);
        }
        Tensor const expected = kept.clone();
        kept += 1; // sanitizers and valgrind see memory that was freed
        replaced += 1;
        CHECK(model->first->weight.grad().data_ptr() == kept.data_ptr());
        CHECK(torch::equal(part, expected.flatten().slice(0, 1, 3) + 1));
        // As memory of libtorch, which a storage frees; that of an arena it only shows.
        CHECK(kept.storage().data_ptr().get_context() != nullptr);
        CHECK(replaced.storage().data_ptr().get_context() != nullptr);
    });
}

TEST_CASE("a gradient penalty is no backward pass, with and without find_unused") {
    for (bool const finds_unused : {false, true}) {
        run_ranks({1, 2, 3}, [&](ThreadCommunicator& comm) {
            auto const penalised = [](Tensor const& outputs, Tensor const& inputs) {
                Tensor const slope = torch::autograd::grad(
                    {outputs.sum()}, {inputs}, {}, /*retain_graph=*/true, /*create_graph=*/true
                )[0];
                return outputs.pow(2).sum() + slope.pow(2).sum();
            };
            torch::nn::Sequential model{
                torch::nn::Linear{3, 4}, torch::nn::Tanh{}, torch::nn::Linear{4, 1}
            };
            model->to(torch::kDouble);
            joinable::torch::DistributedDataParallel ddp{
                comm, model, {.find_unused = finds_unused}
            };
            auto const inputs_of = [](int rank) {
                return torch::full({2, 3}, 0.1 * (1 + rank), torch::kDouble).requires_grad_();
            };
            Tensor expected = torch::zeros_like(model->parameters()[0]);
            for (int rank = 0; rank < comm.size(); ++rank) {
                Tensor const inputs = inputs_of(rank);
                auto const gradients = torch::autograd::grad(
                    {penalised(model->forward(inputs), inputs)}, {model->parameters()[0]}
                );
                expected += gradients[0] / comm.size();
            }
            for (int round = 0; round < 2; ++round) {
                model->zero_grad(true);
                Tensor const inputs = inputs_of(comm.rank());
                penalised(ddp.forward(inputs), inputs).backward();
                Tensor const gradient = model->parameters()[0].grad();
                CHECK((gradient - expected).abs().max().item<double>() < 1e-12);
            }
        });
    }
}

TEST_CASE("a layer that runs again within the backward pass is averaged like the others") {
    for (bool const is_static : {false, true}) {
        run_ranks({1, 2, 3}, [&](ThreadCommunicator& comm) {
            Net model;
            joinable::torch::DistributedDataParallel ddp{comm, model, {.static_graph = is_static}};
            Batch const batch{{comm.rank()}};
            RunsBlockAgain::Run const second = [&](Tensor const& inputs) {
                return model->second->forward(inputs);
            };
            std::vector<Tensor> gradients;
            for (bool const runs_again : {false, false, true, true}) {
                model->zero_grad();
                Tensor const outputs = ddp.forward([&] {
                    Tensor const hidden = torch::tanh(model->first->forward(batch.inputs));
                    Tensor const seen =
                        runs_again ? RunsBlockAgain::apply(hidden, &second) : second(hidden);
                    return seen + model->branch->forward(batch.inputs);
                });
                loss_of(outputs, batch).backward();
                gradients.push_back(torch::cat(
                    {model->first->weight.grad().flatten(),
                     model->second->weight.grad().flatten(),
                     model->branch->weight.grad().flatten()}
                ));
                CHECK(torch::allclose(gradients.back(), gradients.front()));
            }
        });
    }
}

TEST_CASE("a last layer that runs again needs a pass that returns it; without it a sentence says so"
) {
    for (bool const returns : {true, false}) {
        run_ranks({1, 2, 3}, [&](ThreadCommunicator& all) {
            ThreadCommunicator comm = all.split(0, all.rank());
            Net model, alone;
            std::vector<std::unique_ptr<RunsBlockAgain::Run const>> runs; // which a pass refers to
            auto const outputs_of = [&](Net& net, Batch const& batch) {
                Tensor const hidden = torch::tanh(net->first->forward(batch.inputs));
                Tensor const branch = net->branch->forward(batch.inputs);
                runs.push_back(std::make_unique<RunsBlockAgain::Run const>(
                    [second = net->second](Tensor const& inputs) mutable {
                        return second->forward(inputs);
                    }
                ));
                // The second of them goes backward first.
                return branch + RunsBlockAgain::apply(hidden, runs.back().get());
            };
            for (int rank = 0; rank < comm.size(); ++rank) {
                Batch const batch{{rank}};
                (outputs_of(alone, batch).pow(2).sum() / comm.size()).backward();
            }
            joinable::torch::DistributedDataParallel ddp{comm, model};
            Batch const batch{{comm.rank()}};
            Tensor outputs;
            std::string text;
            try {
                if (returns) {
                    outputs = ddp.forward([&] { return outputs_of(model, batch); });
                } else {
                    ddp.forward([&] { outputs = outputs_of(model, batch); });
                }
                outputs.pow(2).sum().backward();
                CHECK(torch::allclose(model->second->weight.grad(), alone->second->weight.grad()));
                CHECK(torch::allclose(model->first->weight.grad(), alone->first->weight.grad()));
            } catch (std::exception const& error) {
                text = error.what();
            }
            CHECK(text.empty() == returns);
            CHECK(text.starts_with(returns ? "" : "not all gradients became ready"));
        });
    }
}

TEST_CASE("with static_graph a layer may run again twice, and without it a sentence says so") {
    using Run = RunsBlockAgain::Run;
    auto const outputs_of = [](Net& net, Batch const& batch, Run const& block, bool runs_again) {
        auto const second = [&](Tensor const& inputs) {
            return runs_again ? RunsBlockAgain::apply(inputs, &block) : block(inputs);
        };
        Tensor const hidden = torch::tanh(net->first->forward(batch.inputs));
        return second(hidden) + second(2 * hidden) + net->branch->forward(batch.inputs);
    };
    for (bool const is_static : {true, false}) {
        run_ranks({1, 2, 3}, [&](ThreadCommunicator& all) {
            ThreadCommunicator comm = all.split(0, all.rank());
            Net model, alone;
            auto const second_of = [](Net& net) -> Run {
                return [&net](Tensor const& inputs) { return net->second->forward(inputs); };
            };
            Run const of_model = second_of(model), of_alone = second_of(alone);
            Tensor expected;
            for (int rank = 0; rank < comm.size(); ++rank) {
                Batch const batch{{rank}};
                Tensor const loss =
                    loss_of(outputs_of(alone, batch, of_alone, false), batch) / comm.size();
                Tensor const own = torch::autograd::grad({loss}, {alone->second->weight})[0];
                expected = expected.defined() ? expected + own : own;
            }
            joinable::torch::DistributedDataParallel ddp{comm, model, {.static_graph = is_static}};
            Batch const batch{{comm.rank()}};
            std::string text;
            try {
                for (int round = 0; round < 3; ++round) {
                    model->zero_grad();
                    auto const pass = [&] { return outputs_of(model, batch, of_model, true); };
                    loss_of(ddp.forward(pass), batch).backward();
                    CHECK(torch::allclose(model->second->weight.grad(), expected));
                }
            } catch (std::exception const& error) {
                text = error.what();
            }
            CHECK(text.empty() == is_static);
            CHECK(
                (is_static ||
                 text.find("or turn static_graph on, which counts its uses") != std::string::npos)
            );
        });
    }
}

TEST_CASE("a torch tensor has no gradient in memory of a model that has ended") {
    run_ranks({1, 2}, [](ThreadCommunicator& comm) {
        torch::nn::Linear layer{3, 1};
        {
            joinable::DistributedDataParallel ddp{comm, layer->parameters()};
            ddp.forward([] {});
            ddp.backward([&](auto ready) { // without gradients of its own
                ready(0);
                ready(1);
            });
            CHECK(layer->weight.grad().defined());
        }
        CHECK(!layer->weight.grad().defined());
    });
}

/// Returns its parameter beside an output, as a model with tied weights does.
struct ReturnsParameterImpl : torch::nn::Module {
    ReturnsParameterImpl() {
        weight = register_parameter("weight", torch::ones({2}, torch::kDouble));
        table = register_buffer(
            "table", torch::full({2, 2}, c10::complex<double>{0, 0}, torch::kComplexDouble)
        );
        counts = register_buffer("counts", torch::zeros({3}, torch::kShort));
    }
    std::vector<Tensor> forward() { return {weight, weight * 2}; }

    Tensor weight;
    Tensor table;
    Tensor counts;
};
TORCH_MODULE(ReturnsParameter);

TEST_CASE("no hooks pile up on a parameter that a pass returns") {
    run_ranks({1, 2}, [](ThreadCommunicator& comm) {
        ReturnsParameter model;
        joinable::torch::DistributedDataParallel ddp{comm, model, {.find_unused = true}};
        for (int round = 0; round < 3; ++round) {
            std::vector<Tensor> const outputs = ddp.forward();
            (outputs[0].sum() + outputs[1].sum()).backward();
            CHECK(torch::autograd::impl::hooks(model->weight).empty());
        }
        CHECK(model->weight.grad()[0].item<double>() == 3 * 3);
        model->zero_grad(true); // the pass may return nothing else
        ddp.forward([&] { return model->weight; }).sum().backward();
        CHECK(model->weight.grad()[0].item<double>() == 1);
    });
}

TEST_CASE("an input that passes return has one hook, and none after the model has ended") {
    run_ranks({1, 2}, [](ThreadCommunicator& comm) {
        Net model;
        Tensor const kept = torch::ones({3, 3}, torch::kDouble).requires_grad_();
        Tensor const once = torch::ones({3, 3}, torch::kDouble).requires_grad_();
        auto const hooks_of = [](Tensor const& tensor) {
            int alive = 0;
            auto const* const meta = torch::autograd::impl::get_autograd_meta(tensor);
            if (meta != nullptr && meta->cpp_hooks_list_) {
                CHECK(meta->cpp_hooks_list_->size() == 1); // what is removed leaves its place
                for (auto const& hook : *meta->cpp_hooks_list_) {
                    alive += hook ? 1 : 0;
                }
            }
            return alive;
        };
        {
            joinable::torch::DistributedDataParallel ddp{comm, model};
            for (int round = 0; round < 4; ++round) {
                model->zero_grad(true);
                auto const [outputs, same, other] = ddp.forward([&] {
                    return std::tuple{
                        model->forward(kept, true), kept, round == 1 ? once : Tensor{}
                    };
                });
                (outputs.sum() + same.sum()).backward();
                CHECK(hooks_of(kept) == 1);
                CHECK(hooks_of(once) == (round == 1 ? 1 : 0));
            }
            CHECK(model->branch->weight.grad()[0][0].item<double>() == 3);
        }
        CHECK(hooks_of(kept) == 0);
        kept.sum().backward();
    });
}

TEST_CASE("a pass that returns a reference gives that reference") {
    run_ranks({1, 2}, [](ThreadCommunicator& comm) {
        Net model;
        joinable::torch::DistributedDataParallel ddp{comm, model};
        Tensor kept;
        auto&& outputs = ddp.forward([&]() -> Tensor& {
            return kept = model->forward(torch::ones({3, 3}, torch::kDouble), true);
        });
        static_assert(std::same_as<decltype(outputs), Tensor&>);
        REQUIRE(&outputs == &kept);
        outputs.sum().backward();
        CHECK(model->branch->weight.grad()[0][0].item<double>() == 3);
    });
}

TEST_CASE("buffers and frozen parameters of any type take rank 0's elements") {
    run_ranks({1, 2, 3}, [](ThreadCommunicator& comm) {
        ReturnsParameter model;
        model->table.fill_(c10::complex<double>{1.5 + comm.rank(), -2});
        model->counts.fill_(300 + comm.rank());
        joinable::torch::DistributedDataParallel ddp{comm, model};
        CHECK(torch::equal(
            model->table, torch::full({2, 2}, c10::complex<double>{1.5, -2}, torch::kComplexDouble)
        ));
        CHECK(torch::equal(model->counts, torch::full({3}, 300, torch::kShort)));
        model->table.fill_(c10::complex<double>{0, 7.0 + comm.rank()});
        std::vector<Tensor> const outputs = ddp.forward();
        (outputs[0] + outputs[1]).sum().backward(); // buffers are sent in between
        CHECK(torch::equal(
            model->table, torch::full({2, 2}, c10::complex<double>{0, 7}, torch::kComplexDouble)
        ));
    });
    auto const all_types = {
        torch::kByte,
        torch::kChar,
        torch::kShort,
        torch::kInt,
        torch::kLong,
        torch::kBool,
        torch::kHalf,
        torch::kBFloat16,
        torch::kFloat,
        torch::kDouble,
        torch::kComplexFloat,
        torch::kComplexDouble
    };
    run_ranks({1, 2, 3, 4, 8}, [&](ThreadCommunicator& comm) {
        auto const values = [](c10::ScalarType type, int rank) {
            return torch::arange(6).add(rank).remainder(5).to(type).reshape({2, 3});
        };
        torch::nn::Linear model{2, 1};
        for (auto const type : all_types) {
            std::string const name = c10::toString(type);
            Tensor const mine = values(type, comm.rank());
            model->register_buffer("buffer" + name, mine.clone());
            model->register_buffer("gaps" + name, torch::stack({mine, mine}, 2).select(2, 0).t());
            model->register_parameter("frozen" + name, mine.clone(), false);
        }
        joinable::torch::DistributedDataParallel ddp{comm, model};
        auto const buffers = model->named_buffers();
        auto const parameters = model->named_parameters();
        for (auto const type : all_types) {
            std::string const name = c10::toString(type);
            CAPTURE(name);
            Tensor const expected = values(type, 0);
            CHECK(torch::equal(buffers["buffer" + name], expected));
            CHECK(torch::equal(buffers["gaps" + name], expected.t()));
            CHECK(torch::equal(parameters["frozen" + name], expected));
        }
    });
    run_ranks({1, 2, 3}, [](ThreadCommunicator& comm) { // a type that joinable has no name for
        torch::nn::Linear model{2, 1};
        Tensor table = torch::full({2, 3}, 7 + comm.rank(), torch::kInt).view(torch::kComplexHalf);
        model->register_buffer("table", table.t());
        joinable::torch::DistributedDataParallel ddp{comm, model};
        CHECK(torch::equal(table.view(torch::kInt), torch::full({2, 3}, 7, torch::kInt)));
        table.view(torch::kInt).fill_(1 << (20 + comm.rank()));
        ddp.forward(torch::ones({1, 2})).sum().backward();
        CHECK(torch::equal(table.view(torch::kInt), torch::full({2, 3}, 1 << 20, torch::kInt)));
        torch::nn::Linear other{2, 1};
        other->register_buffer(
            "table", torch::quantize_per_tensor(torch::ones({2}), 0.1, 0, torch::kQInt8)
        );
        std::string text;
        try {
            joinable::torch::DistributedDataParallel{comm, other};
        } catch (std::exception const& error) {
            text = error.what();
        }
        CHECK(text.find("QInt8") != std::string::npos);
    });
}

TEST_CASE("the gradient of a complex parameter that a pass conjugates is averaged") {
    run_ranks({1, 2, 3}, [](ThreadCommunicator& comm) {
        struct Turned : torch::nn::Module {
            Tensor forward(Tensor const& inputs) {
                return torch::real(weight.conj() * inputs).sum();
            }
            Tensor weight = register_parameter("weight", torch::ones({3}, torch::kComplexDouble));
        };
        for (bool const views : {false, true}) {
            Turned model;
            joinable::torch::DistributedDataParallel ddp{
                comm, model, {.gradient_as_bucket_view = views}
            };
            c10::complex<double> const input{1.0 + comm.rank(), 4};
            for (int round = 0; round < 2; ++round) {
                model.zero_grad();
                ddp.forward(torch::full({3}, input, torch::kComplexDouble)).backward();
                // d/dw of Re(conj(w) x) is x
                Tensor const error =
                    model.weight.grad() - c10::complex<double>{(comm.size() + 1) / 2.0, 4};
                CHECK(torch::abs(error).max().item<double>() < 1e-12);
            }
        }
    });
}

TEST_CASE("complex parameters are averaged as PyTorch does, by their parts") {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        struct Phase : torch::nn::Module {
            explicit Phase(c10::ScalarType type)
                : weight{register_parameter("weight", torch::ones({3}, type))} {}
            Tensor forward(Tensor const& inputs) { return torch::real(weight * inputs).sum(); }
            Tensor weight;
        };
        for (auto const type : {torch::kComplexFloat, torch::kComplexDouble}) {
            Phase model{type};
            torch::optim::SGD optimizer{model.parameters(), torch::optim::SGDOptions{0.0}};
            joinable::torch::DistributedDataParallel ddp{comm, model};
            joinable::torch::Step step{comm, optimizer};
            joinable::Join guard{joinable::participants(ddp, step)};
            for (int round = 0; round <= comm.rank();
                 ++round) { // the last rank has the last round alone
                model.zero_grad();
                ddp.forward(torch::full({3}, c10::complex<double>{8.0 * comm.rank(), 8}, type))
                    .backward();
                double real = 0, imaginary = 0; // d/dw of Re(w x) is the conjugate of x
                for (int rank = round; rank < comm.size(); ++rank) {
                    real += 8.0 * rank / comm.size();
                    imaginary -= 8.0 / comm.size();
                }
                Tensor const error = model.weight.grad() - c10::complex<double>{real, imaginary};
                CHECK(torch::abs(error).max().item<double>() < 1e-5);
                step.step();
            }
            guard.finish();
        }
    });
}

// ---- what goes wrong

struct AutogradError : std::runtime_error {
    using std::runtime_error::runtime_error;
};
struct ThrowsInBackward : torch::autograd::Function<ThrowsInBackward> {
    static Tensor forward(torch::autograd::AutogradContext*, Tensor const& x) { return x.clone(); }
    static torch::autograd::variable_list
    backward(torch::autograd::AutogradContext*, torch::autograd::variable_list const&) {
        throw AutogradError{"rank 0 has had enough"};
    }
};

TEST_CASE("what is thrown within autograd keeps its type, and the others hear of it") {
    for (bool const early :
         {false, true}) { // before any gradient is ready, or after that of the last layer
        run_ranks({2, 3, 4, 8}, [&](ThreadCommunicator& comm) {
            Net model;
            model->freeze_branch();
            joinable::torch::DistributedDataParallel ddp{
                comm, model, {.first_bucket_bytes = 1, .rebuild_buckets = false}
            };
            Batch const batch{{1}};
            auto const train = [&] {
                joinable::Join guard{joinable::participants(ddp)};
                auto const outputs = ddp.forward([&] {
                    auto inner = torch::tanh(model->first->forward(batch.inputs));
                    if (comm.rank() == 0 && !early) {
                        inner = ThrowsInBackward::apply(inner);
                    }
                    inner = model->second->forward(inner);
                    return comm.rank() == 0 && early ? ThrowsInBackward::apply(inner) : inner;
                });
                ddp.backward(loss_of(outputs, batch));
                guard.finish();
            };
            if (comm.rank() == 0) {
                CHECK_THROWS_AS(train(), AutogradError);
            } else {
                try {
                    train();
                    CHECK(false);
                } catch (joinable::PeerFailed const& error) {
                    CHECK(error.rank() == 0);
                    CHECK(std::string{error.what()}.find("has had enough") != std::string::npos);
                }
            }
        });
    }
}

TEST_CASE("a batch that fails within autograd can be skipped") {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        Net model;
        model->freeze_branch();
        joinable::torch::DistributedDataParallel ddp{comm, model};
        joinable::Join guard{joinable::participants(ddp)};
        for (int round = 0; round < 3; ++round) {
            Batch const batch{{round}};
            model->zero_grad();
            try {
                Tensor outputs = ddp.forward(batch.inputs);
                if (round == 1 && comm.rank() == 0) {
                    outputs = ThrowsInBackward::apply(outputs);
                }
                loss_of(outputs, batch).backward();
            } catch (AutogradError const&) {
                ddp.skip();
            }
            Net alone;
            loss_of(alone->forward(batch.inputs), batch).backward();
            double const share = round == 1 ? double(comm.size() - 1) / comm.size() : 1;
            auto const error = model->first->weight.grad() - share * alone->first->weight.grad();
            CHECK(error.abs().max().item<double>() < 1e-12);
        }
        CHECK(guard.finish().rounds == 3);
    });
}

TEST_CASE("backward passes without a forward pass of their own are refused by a text that says so"
) {
    run_ranks({1, 2, 4}, [](ThreadCommunicator& comm) {
        Net model;
        model->freeze_branch();
        joinable::torch::DistributedDataParallel ddp{comm, model};
        Batch const batch{{1}};
        auto const refuses = [](Tensor const& loss) {
            try {
                loss.backward();
                CHECK(false);
            } catch (ContractViolation const& error) {
                CHECK(
                    std::string{error.what()}.find(
                        "call ddp.forward(inputs) in place of the module's"
                    ) != std::string::npos
                );
            }
        };
        refuses(loss_of(model->forward(batch.inputs), batch));
        Tensor const loss = loss_of(ddp.forward(batch.inputs), batch);
        loss.backward({}, true);
        refuses(loss);
    });
}

TEST_CASE("a reduction that could not begin is not begun again by what is left of the backward pass"
) {
    run_ranks({2, 3}, [](ThreadCommunicator& comm) {
        Net model;
        model->freeze_branch();
        joinable::torch::DistributedDataParallel ddp{comm, model, {.verify_replicas = 1}};
        Batch const batch{{1}};
        for (bool const is_changed : {false, true}) { // on one rank, behind joinable's back
            if (is_changed && comm.rank() == 1) {
                torch::NoGradGuard const no_graph;
                model->first->weight.mul_(2);
            }
            Tensor const loss = loss_of(ddp.forward(batch.inputs), batch);
            if (is_changed) {
                CHECK_THROWS_AS(loss.backward({}, true), joinable::Mismatch);
                if (comm.rank() == 0) { // as a thread of another device that waited for its turn
                    CHECK_THROWS_WITH_AS(
                        loss.backward(),
                        "the reduction of this backward pass could not begin, as its first error says",
                        ContractViolation
                    );
                }
            } else {
                loss.backward();
            }
        }
    });
}

/// Its buckets take long, and it tells where a thread is in them.
class SlowBuckets {
public:
    static inline std::atomic<bool> has_come{false};
    static inline std::atomic<bool> has_left{false};

    struct Range {};
    static Range round(bool) { return {}; }
    static Range bucket(std::size_t, std::size_t) {
        has_come = true;
        std::this_thread::sleep_for(std::chrono::milliseconds{100});
        has_left = true;
        return {};
    }
};

TEST_CASE(
    "an error of a backward pass, and the end of the model, wait for a thread that is in a hook"
) {
    for (bool const ends : {false, true}) {
        CAPTURE(ends);
        SlowBuckets::has_come = SlowBuckets::has_left = false;
        run_ranks({1}, [ends](ThreadCommunicator& comm) {
            torch::nn::Linear model{torch::nn::LinearOptions(2, 2).bias(false)};
            model->weight.mutable_grad() = torch::zeros({2, 2});
            using Ddp = joinable::torch::DistributedDataParallel<
                ThreadCommunicator,
                torch::nn::LinearImpl,
                joinable::AllReduce,
                SlowBuckets>;
            std::optional<Ddp> ddp;
            ddp.emplace(comm, model);
            std::future<void> other; // what libtorch does in the thread that it has for a device
            Tensor const outputs = ddp->forward([&] {
                Tensor const inside = torch::ones({1}).set_requires_grad(true) * 1;
                inside.register_hook([&](Tensor const&) {
                    other = std::async(std::launch::async, [&] {
                        auto const node = torch::autograd::impl::grad_accumulator(model->weight);
                        for (auto const& hook : node->post_hooks()) {
                            (*hook)({}, {});
                        }
                    });
                    joinable_tests::wait_until([&] {
                        return SlowBuckets::has_come ||
                               other.wait_for(std::chrono::seconds{0}) == std::future_status::ready;
                    });
                    throw AutogradError{"a node on the host had enough"};
                });
                return inside * 1;
            });
            if (ends) {
                CHECK_THROWS_AS(outputs.backward(), AutogradError);
                ddp.reset();
            } else {
                CHECK_THROWS_AS(ddp->backward(outputs), AutogradError);
            }
            bool const has_left = SlowBuckets::has_left;
            other.get();
            CHECK(has_left);
        });
    }
}

TEST_CASE("with find_unused a pass returns what can be looked into") {
    struct Outputs {
        Tensor tensor;
    };
    run_ranks({1, 2}, [](ThreadCommunicator& comm) {
        Net model;
        Batch const batch{{1}};
        joinable::torch::DistributedDataParallel plain{comm, model};
        loss_of(
            plain.forward([&] { return Outputs{model->forward(batch.inputs, true)}; }).tensor, batch
        )
            .backward();
    });
    run_ranks({1, 2}, [](ThreadCommunicator& comm) {
        Net model;
        Batch const batch{{1}};
        joinable::torch::DistributedDataParallel ddp{comm, model, {.find_unused = true}};
        auto const [first, rest] = ddp.forward([&] {
            auto const outputs = model->forward(batch.inputs);
            return std::pair{outputs, std::vector<c10::optional<Tensor>>{outputs * 2, {}}};
        });
        loss_of(first + *rest[0], batch).backward();
        char const* const text =
            "find_unused reads the graph of what forward() returns; return tensors, or optionals, tuples or ranges "
            "of them";
        CHECK_THROWS_WITH(ddp.forward([&] { return Outputs{model->forward(batch.inputs)}; }), text);
        ddp.skip();
        Tensor loss; // without a tensor all parameters would count as unused
        CHECK_THROWS_WITH(
            ddp.forward([&] { loss = loss_of(model->forward(batch.inputs), batch); }), text
        );
        ddp.skip();
        CHECK_THROWS_WITH(
            ddp.forward([&] {
                loss = loss_of(model->forward(batch.inputs), batch);
                return std::pair{loss.item<double>(), std::vector<int>{}};
            }),
            text
        );
    });
}

/// What `body` prints on stderr.
std::string printed_by(std::function<void()> const& body) {
    std::unique_ptr<std::FILE, int (*)(std::FILE*)> const file{std::tmpfile(), &std::fclose};
    REQUIRE(file);
    std::fflush(stderr);
    int const kept = dup(2);
    dup2(fileno(file.get()), 2);
    body();
    std::fflush(stderr);
    dup2(kept, 2);
    close(kept);
    std::rewind(file.get());
    std::string text(4096, '\0');
    text.resize(std::fread(text.data(), 1, text.size(), file.get()));
    return text;
}

TEST_CASE("a joined rank whose optimizer falls behind is told so, once") {
    auto const train = [](bool with_step) {
        return printed_by([&] {
            joinable::run_threads(3, [&](ThreadCommunicator& comm) {
                Net model;
                model->freeze_branch();
                torch::optim::SGD optimizer{model->parameters(), sgd};
                joinable::torch::DistributedDataParallel ddp{comm, model};
                joinable::torch::Step step{comm, optimizer};
                Batch const batch{{1}};
                auto const train_with = [&](auto&... participants) {
                    joinable::Join guard{joinable::participants(ddp, participants...)};
                    for (int i = 0; i < (comm.rank() == 1 ? 5 : 2); ++i) {
                        loss_of(ddp.forward(batch.inputs), batch).backward();
                        (participants.step(), ...);
                    }
                    guard.finish();
                };
                for (int epoch = 0; epoch < 2; ++epoch) {
                    with_step ? train_with(step) : train_with();
                }
            });
        });
    };
    CHECK(train(true).find("joinable") == std::string::npos);
    std::string const text = train(false);
    for (char const* const rank : {"rank 0", "rank 2"}) {
        auto const begin = text.find(
            rank + std::string{" had joined for 3 rounds in which its optimizer did not step"}
        );
        CHECK(begin != std::string::npos);
        CHECK(text.find(rank, begin + 1) == std::string::npos);
    }
    CHECK(text.find("rank 1") == std::string::npos);
}

} // namespace
