// SPDX-License-Identifier: BSL-1.0
// libtorch modules whose values ranks keep in parts. The oracle: libtorch itself, on one rank, over all samples.
#include <joinable/interop/torch_sharded.hpp>

#include <torch/torch.h> // before doctest: both have a macro CHECK

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <unistd.h>

#include <support/process_ranks.hpp>
#include <support/ranks.hpp>
#include <support/torch_small_net.hpp>

#include <joinable/checkpoint.hpp>
#include <joinable/communicator/self.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/zero.hpp>

namespace {

using joinable::ShardedOptions;
using joinable::Sharding;
using joinable::ThreadCommunicator;
using joinable_tests::run_process_ranks;
using joinable_tests::run_ranks;
using namespace joinable_tests::small_net;
using torch::Tensor;

auto const adam_of_parts = [](std::vector<Tensor> mine) {
    return torch::optim::Adam{std::move(mine), torch::optim::AdamOptions{0.1}};
};
ShardedOptions const by_layers{
    .sharding = Sharding::parameters, .sync_at_end = false, .units = {2, 2, 2}
};

bool is_there(Tensor const& tensor) {
    return tensor.storage().nbytes() != 0;
}
std::size_t count_there(std::vector<Tensor> const& tensors) {
    return static_cast<std::size_t>(std::count_if(tensors.begin(), tensors.end(), is_there));
}

template <class Sharded>
Tensor pass_of(Sharded& sharded, SmallNet& model, Tensor const& inputs) {
    Tensor hidden;
    {
        auto const held = sharded.use(model->first);
        hidden = torch::tanh(model->first->forward(inputs));
    }
    auto const held = sharded.use(model->second);
    return model->second->forward(hidden);
}
template <class Sharded>
void set_rate_of(Sharded& sharded, int round) {
    if constexpr (requires { sharded.local(); }) {
        sharded.local().param_groups()[0].options().set_lr(rate_of(round));
    } else {
        sharded.rule().learning_rate = rate_of(round);
    }
}
template <class Sharded>
std::vector<double> values_of(Sharded& sharded, SmallNet& model) {
    auto const held = sharded.use_all();
    return numbers_of(*model);
}

/// Trains on this rank's batches, and returns their losses.
template <class Sharded>
std::vector<double> train_parts(
    Sharded& sharded,
    SmallNet& model,
    int rank,
    double max_norm = 0,
    int first = 0,
    int end = rounds
) {
    std::vector<double> losses;
    joinable::Join guard{joinable::participants(sharded)};
    for (int round = first; round < std::min(end, rounds_of(rank)); ++round) {
        set_rate_of(sharded, round);
        Tensor const outputs =
            sharded.forward([&] { return pass_of(sharded, model, inputs_of(rank, round)); });
        Tensor const loss = loss_of(outputs, rank, round);
        loss.backward();
        losses.push_back(loss.template item<double>());
        if (max_norm != 0) {
            sharded.clip_grad_norm_(max_norm);
        }
        sharded.step();
    }
    guard.finish();
    return losses;
}

template <class Comm, class Rule>
void check_parts(Comm& comm, Rule const& rule, ShardedOptions const& options, double max_norm = 0) {
    CAPTURE(comm.size());
    auto const rank = static_cast<int>(comm.rank());
    Training const expected =
        train_alone(static_cast<int>(comm.size()), adam_of_parts, [&](SmallNet& net) {
            if (max_norm != 0) {
                torch::nn::utils::clip_grad_norm_(net->parameters(), max_norm);
            }
        });
    SmallNet model;
    if (rank != 0) {
        torch::NoGradGuard const no_graph;
        model->first->weight.mul_(2);
    }
    joinable::torch::ShardedDataParallel sharded{comm, model, rule, options};
    CHECK(count_there(model->parameters()) == 0);
    auto const losses = train_parts(sharded, model, rank, max_norm);
    CHECK(count_there(model->parameters()) == 0);
    if (rank == 0) {
        check_close(losses, expected.losses, 1e-9);
    }
    check_close(values_of(sharded, model), expected.values, 1e-9);
    CHECK(count_there(model->parameters()) == 0);

    ShardedOptions whole = options;
    whole.sharding = Sharding::gradients;
    whole.units.clear();
    SmallNet other;
    joinable::torch::ShardedDataParallel stage_2{comm, other, rule, whole};
    CHECK(train_parts(stage_2, other, rank, max_norm) == losses);
}

TEST_CASE("values of a libtorch module that ranks keep in parts train as those of one process") {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        check_parts(comm, joinable::Adam{}, by_layers);
        check_parts(comm, adam_of_parts, by_layers, 0.05);
        check_parts(
            comm,
            joinable::Adam{},
            {.sharding = Sharding::parameters, .bucket_cap_bytes = 1, .sync_at_end = false},
            0.05
        );
        check_parts(
            comm,
            joinable::Adam{},
            {.sharding = Sharding::parameters,
             .partition = joinable::Partition::flat,
             .step_in_backward = true,
             .units = {1, 1, 4}}
        );
    });
    run_process_ranks(
        {3},
        [](joinable::ProcessCommunicator& comm) { check_parts(comm, adam_of_parts, by_layers); },
        {.other_threads = true}
    ); // of a BLAS
}

TEST_CASE("rounds of a libtorch module in parts accumulate, and are evaluated between") {
    run_ranks({1, 2, 3}, [](ThreadCommunicator& comm) {
        SmallNet alone;
        auto optimizer = adam_of_parts(alone->parameters());
        SmallNet model;
        joinable::torch::ShardedDataParallel sharded{comm, model, adam_of_parts, by_layers};
        joinable::Join guard{joinable::participants(sharded)};
        for (int round = 0; round < 6; ++round) {
            for (int rank = 0; rank < comm.size(); ++rank) {
                (loss_of(alone->forward(inputs_of(rank, round)), rank, round) / comm.size())
                    .backward();
            }
            auto const pass = [&] {
                return pass_of(sharded, model, inputs_of(comm.rank(), round));
            };
            loss_of(sharded.forward(pass, {.will_sync = round % 2 == 1}), comm.rank(), round)
                .backward();
            CHECK(count_there(model->parameters()) == 0);
            if (round % 2 == 1) {
                optimizer.step();
                optimizer.zero_grad();
                sharded.step();
                torch::NoGradGuard const no_graph;
                Tensor const seen = sharded.forward(pass);
                CHECK(torch::allclose(seen, alone->forward(inputs_of(comm.rank(), round))));
                CHECK(count_there(model->parameters()) == 0);
            }
        }
        guard.finish();
        check_close(values_of(sharded, model), numbers_of(*alone), 1e-9);
    });
}

constexpr std::size_t depth = 6;

/// Linear layers in doubles, with the same start on all ranks.
torch::nn::Sequential deep_net() {
    torch::nn::Sequential net;
    for (std::size_t k = 0; k < depth; ++k) {
        net->push_back(torch::nn::Linear{4, 4});
    }
    net->to(torch::kDouble);
    torch::NoGradGuard const no_graph;
    double start = 0;
    for (Tensor& parameter : net->parameters()) {
        parameter.copy_(torch::arange(parameter.numel(), torch::kDouble)
                            .view(parameter.sizes())
                            .add(start)
                            .sin());
        start += 1;
    }
    return net;
}
Tensor deep_inputs(int rank, int round) {
    return torch::arange(8, torch::kDouble).view({2, 4}).add(3 * rank + round).cos();
}
std::vector<double> numbers_of_all(std::vector<Tensor> const& tensors) {
    std::vector<double> numbers;
    for (Tensor const& tensor : tensors) {
        Tensor const flat = tensor.detach().contiguous();
        auto const* const data = flat.data_ptr<double>();
        numbers.insert(numbers.end(), data, data + flat.numel());
    }
    return numbers;
}
ShardedOptions const each_layer{
    .sharding = Sharding::parameters, .units = std::vector<std::size_t>(depth, 2)
};

/// Trains a deep net by SGD, in parts and alone, where `pass(use, net, inputs)` is the forward pass and `loss` is of what it
/// returns.
template <class Pass, class Loss>
void check_deep(Pass const& pass, Loss const& loss, ShardedOptions const& options = each_layer) {
    run_ranks({1, 2, 3}, [&](ThreadCommunicator& comm) {
        auto alone = deep_net();
        torch::optim::SGD optimizer{alone->parameters(), torch::optim::SGDOptions{0.1}};
        auto model = deep_net();
        joinable::torch::ShardedDataParallel sharded{
            comm, model, joinable::Sgd{.learning_rate = 0.1}, options
        };
        auto const nothing = [](auto const&) { return std::vector<int>{}; };
        auto const use = [&](auto const& part) { return sharded.use(part); };
        joinable::Join guard{joinable::participants(sharded)};
        for (int round = 0; round < 4; ++round) {
            optimizer.zero_grad();
            for (int rank = 0; rank < comm.size(); ++rank) {
                (loss(pass(nothing, alone, deep_inputs(rank, round)), round) / comm.size())
                    .backward();
            }
            optimizer.step();
            auto const outputs =
                sharded.forward([&] { return pass(use, model, deep_inputs(comm.rank(), round)); });
            loss(outputs, round).backward();
            CHECK(count_there(model->parameters()) == 0);
            sharded.step();
        }
        guard.finish();
        auto const held = sharded.use_all();
        check_close(numbers_of_all(model->parameters()), numbers_of_all(alone->parameters()), 1e-9);
    });
}
auto const square = [](Tensor const& outputs, int) { return outputs.pow(2).mean(); };

TEST_CASE("the values of two layers of a libtorch module exist at a time, in either pass") {
    run_ranks({1, 2, 3, 4}, [](ThreadCommunicator& comm) {
        for (bool const is_assigned : {false, true}) { // over what held the layer before
            CAPTURE(is_assigned);
            auto model = deep_net();
            joinable::torch::ShardedDataParallel sharded{comm, model, joinable::Sgd{}, each_layer};
            CHECK((comm.size() > 1 || sharded.unit_bytes() == 2 * std::size_t{192})
            ); // of 20 doubles, at cache lines
            auto const parameters = model->parameters();
            std::vector<std::size_t> forward;
            std::vector<std::size_t> backward;
            Tensor const outputs = sharded.forward([&] {
                typename decltype(sharded)::HeldValues held;
                Tensor x = deep_inputs(comm.rank(), 0);
                for (auto& layer : *model) {
                    if (!is_assigned) {
                        held.release();
                    }
                    held = sharded.use(layer.ptr());
                    x = layer.forward(x);
                    forward.push_back(count_there(parameters));
                    x.register_hook([&](Tensor const&) {
                        backward.push_back(count_there(parameters));
                    });
                }
                return x;
            });
            CHECK(count_there(parameters) == 0);
            outputs.sum().backward();
            CHECK(count_there(parameters) == 0);
            sharded.step();
            CHECK(forward == std::vector<std::size_t>(depth, 2));
            REQUIRE(backward.size() == depth);
            CHECK(*std::max_element(backward.begin(), backward.end()) <= 4);
        }
    });
}

TEST_CASE("values that a pass of libtorch holds over later layers stay for the backward pass") {
    // The first layer runs once more at the end, as tied weights do.
    auto const tied = [](auto const& use, torch::nn::Sequential& net, Tensor x) {
        auto const first = use(net->ptr(0));
        x = torch::tanh(net->at<torch::nn::LinearImpl>(0).forward(x));
        for (std::size_t k = 1; k < depth; ++k) {
            auto const held = use(net->ptr(k));
            x = torch::tanh(net->at<torch::nn::LinearImpl>(k).forward(x));
        }
        return net->at<torch::nn::LinearImpl>(0).forward(x);
    };
    ShardedOptions const two_units{.sharding = Sharding::parameters, .units = {2, 10}};
    check_deep(tied, square);
    check_deep(tied, square, two_units); // over one later unit
    check_deep(                          // the same, within what holds both
        [](auto const& use, torch::nn::Sequential& net, Tensor const& x) {
            auto const held = use(net);
            auto const hidden = torch::tanh(net->forward(x));
            auto const first = use(net->ptr(0));
            return net->at<torch::nn::LinearImpl>(0).forward(hidden);
        },
        square,
        two_units
    );
    check_deep( // all at once
        [](auto const& use, torch::nn::Sequential& net, Tensor const& x) {
            auto const held = use(net);
            return net->forward(x);
        },
        square
    );
    check_deep( // a unit of two layers, and one weight that a pass reads by itself
        [](auto const& use, torch::nn::Sequential& net, Tensor x) {
            for (std::size_t k = 0; k + 1 < depth; ++k) {
                auto const held = use(net->ptr(k));
                x = torch::tanh(net->at<torch::nn::LinearImpl>(k).forward(x));
            }
            Tensor const& last = net->at<torch::nn::LinearImpl>(depth - 1).weight;
            auto const held = use(last);
            return torch::matmul(x, last.detach()) + x * last.sum();
        },
        square,
        {.sharding = Sharding::parameters, .units = {4, 4, 2, 2}}
    );
}

TEST_CASE("layers that a pass or a loss of libtorch does not use are stepped by zeros") {
    check_deep(
        [](auto const& use, torch::nn::Sequential& net, Tensor const& inputs) {
            std::vector<Tensor> heads;
            Tensor x = inputs;
            for (std::size_t const k :
                 {std::size_t{0}, std::size_t{2}, std::size_t{3}, std::size_t{5}}) {
                auto const held = use(net->ptr(k));
                x = torch::tanh(net->at<torch::nn::LinearImpl>(k).forward(x));
                heads.push_back(x);
            }
            return heads;
        },
        [](std::vector<Tensor> const& heads, int round) {
            return heads[static_cast<std::size_t>(round)].pow(2).mean();
        }
    );
}

TEST_CASE("a checkpointed block of libtorch has its values where it runs again") {
    std::vector<std::unique_ptr<RunsBlockAgain::Run>> runs;
    std::mutex mutex;
    check_deep(
        [&](auto const& use, torch::nn::Sequential& net, Tensor x) {
            x.requires_grad_(true);
            for (std::size_t k = 0; k < depth; ++k) {
                auto const held = use(net->ptr(k));
                auto run =
                    std::make_unique<RunsBlockAgain::Run>([net, k](Tensor const& inputs) mutable {
                        return torch::tanh(net->at<torch::nn::LinearImpl>(k).forward(inputs));
                    });
                x = RunsBlockAgain::apply(x, static_cast<RunsBlockAgain::Run const*>(run.get()));
                std::lock_guard const lock{mutex};
                runs.push_back(std::move(run));
            }
            return x;
        },
        square
    );
}

TEST_CASE(
    "a batch that fails in a pass of a libtorch module in parts is skipped, or the others hear of it"
) {
    for (bool const in_forward : {true, false}) {
        for (bool const skips : {true, false}) {
            run_ranks({1, 2, 3}, [&](ThreadCommunicator& comm) {
                CAPTURE(in_forward);
                CAPTURE(skips);
                SmallNet model;
                joinable::torch::ShardedDataParallel sharded{comm, model, adam_of_parts, by_layers};
                bool const fails = comm.rank() == comm.size() - 1;
                std::string text;
                try {
                    joinable::Join guard{joinable::participants(sharded)};
                    for (int round = 0; round < 3; ++round) {
                        bool const is_bad = fails && round == 1;
                        try {
                            Tensor const outputs = sharded.forward([&] {
                                auto const all = sharded.use(model); // kept
                                Tensor const hidden =
                                    torch::tanh(model->first->forward(inputs_of(comm.rank(), round))
                                    );
                                if (is_bad && in_forward) {
                                    throw AutogradError{"a batch that cannot be differentiated"};
                                }
                                return model->second->forward(
                                    is_bad ? ThrowsInBackward::apply(hidden) : hidden
                                );
                            });
                            sharded.backward(loss_of(outputs, comm.rank(), round));
                        } catch (AutogradError const&) {
                            if (!skips) {
                                throw;
                            }
                            sharded.skip();
                        }
                        CHECK(count_there(model->parameters()) == 0);
                        sharded.step();
                    }
                    guard.finish();
                } catch (std::exception const& error) {
                    text = error.what();
                }
                CHECK(
                    (text.find("a batch that cannot be differentiated") != std::string::npos) ==
                    !skips
                );
                if (skips) {
                    std::vector<double> const values = values_of(sharded, model);
                    std::vector<double> of_first = values;
                    joinable::broadcast(comm, of_first, 0).wait();
                    CHECK(of_first == values);
                }
            });
        }
    }
}

TEST_CASE(
    "a file has the values and the state of a libtorch module in parts, for any number of ranks"
) {
    auto const file = std::filesystem::temp_directory_path() /
                      ("joinable_torch_parts_" + std::to_string(getpid()));
    run_ranks({3}, [&](ThreadCommunicator& comm) {
        SmallNet model;
        joinable::torch::ShardedDataParallel sharded{comm, model, adam_of_parts, by_layers};
        static_cast<void>(train_parts(sharded, model, 0, 0, 0, 5)); // the batches of rank 0
        joinable::Checkpoint save{sharded, file};
        save.write();
    });
    for (int const readers : {1, 2, 3}) {
        run_ranks({readers}, [&](ThreadCommunicator& comm) {
            Training const expected = train_alone(1, adam_of_parts);
            SmallNet model;
            joinable::torch::ShardedDataParallel sharded{comm, model, adam_of_parts, by_layers};
            joinable::Checkpoint load{sharded, file};
            load.read();
            static_cast<void>(train_parts(sharded, model, 0, 0, 5));
            check_close(values_of(sharded, model), expected.values, 1e-9);
        });
    }
    std::filesystem::remove(file);
}

TEST_CASE("an evaluation of a libtorch module in parts makes no graph, also with gradients on") {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        auto alone = deep_net();
        auto model = deep_net();
        joinable::torch::ShardedDataParallel sharded{comm, model, joinable::Sgd{}, each_layer};
        for (int round = 0; round < 2; ++round) {
            Tensor const inputs = deep_inputs(comm.rank(), round);
            Tensor const outputs = sharded.forward(
                [&] {
                    auto const held = sharded.use(model);
                    return model->forward(inputs);
                },
                {.phase = joinable::Phase::evaluate}
            );
            CHECK(!outputs.requires_grad());
            CHECK(at::GradMode::is_enabled());
            CHECK(torch::equal(outputs, alone->forward(inputs)));
            CHECK(count_there(model->parameters()) == 0);
        }
        auto other = deep_net();
        joinable::torch::ShardedDataParallel stage_2{
            comm, other, joinable::Sgd{}, {.sharding = Sharding::gradients}
        };
        auto const pass = [&] { return other->forward(deep_inputs(comm.rank(), 0)); };
        CHECK(stage_2.forward(pass, {.phase = joinable::Phase::evaluate}).requires_grad());
    });
}

TEST_CASE("torch::save and torch::load take values of a module in parts while all are there") {
    run_ranks({1, 2, 3}, [](ThreadCommunicator& comm) {
        auto model = deep_net();
        std::optional<
            joinable::torch::
                ShardedDataParallel<ThreadCommunicator, torch::nn::SequentialImpl, joinable::Sgd>>
            sharded;
        sharded.emplace(comm, model, joinable::Sgd{.learning_rate = 0.1}, each_layer);
        auto const trains = [&] {
            sharded
                ->forward([&] {
                    auto const held = sharded->use(model);
                    return model->forward(deep_inputs(comm.rank(), 0));
                })
                .pow(2)
                .mean()
                .backward();
            sharded->step();
        };
        auto const saves = [&] {
            std::stringstream file;
            torch::save(model, file);
            return file;
        };
        CHECK(!refusal(saves).empty()); // not a file without values
        std::stringstream file;
        {
            auto const held = sharded->use_all();
            file = saves();
        }
        trains();
        {
            auto const held = sharded->use_all();
            CHECK(numbers_of_all(model->parameters()) != numbers_of_all(deep_net()->parameters()));
            torch::load(model, file);
            sharded->reload();
        }
        CHECK(count_there(model->parameters()) == 0);
        {
            auto const held = sharded->use_all();
            CHECK(numbers_of_all(model->parameters()) == numbers_of_all(deep_net()->parameters()));
        }
        CHECK(refusal(trains).starts_with("parameter 0.weight was set anew"));
        sharded.reset();
        CHECK(!refusal(saves).empty());
    });
}

/// Two parameters in one storage, or one that is a part of it.
struct SharedStorageImpl : torch::nn::Module {
    explicit SharedStorageImpl(bool both) {
        Tensor const all = torch::ones({4}, torch::kDouble);
        register_parameter("low", both ? all : all.narrow(0, 0, 2).detach());
        if (both) {
            register_parameter("high", all.detach().narrow(0, 2, 2));
        }
    }
    static Tensor forward(Tensor const& x) { return x; }
};
TORCH_MODULE(SharedStorage);

/// y = scale * cos * low, where buffers have one memory, and frozen parameters another.
struct RotatedImpl : torch::nn::Module {
    /// `shares`: what has the memory of `scale`.
    explicit RotatedImpl(std::string const& shares = "") {
        Tensor const trained = torch::ones({2}, torch::kDouble);
        auto const frozen = torch::arange(1, 5, torch::kDouble).chunk(2);
        low = register_parameter("low", shares == "low" ? trained.detach() : frozen[0], false);
        register_parameter("high", frozen[1], false);
        scale = register_parameter("scale", trained);
        auto const both = torch::arange(5, 9, torch::kDouble).chunk(2);
        cos = register_buffer("cos", both[0]);
        register_buffer("sin", shares == "sin" ? trained.detach() : both[1]);
    }
    Tensor forward() { return scale * cos * low; }

    Tensor low, scale, cos;
};
TORCH_MODULE(Rotated);

TEST_CASE("buffers and frozen parameters of a libtorch module in parts may share memory") {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        Rotated model;
        joinable::torch::ShardedDataParallel sharded{
            comm, model, joinable::Sgd{.learning_rate = 0.5}, {.sharding = Sharding::parameters}
        };
        sharded
            .forward([&] {
                auto const held = sharded.use(model);
                return model->forward();
            })
            .sum()
            .backward();
        sharded.step();
        auto const held = sharded.use_all(); // 1 - 0.5 * cos * low
        CHECK(numbers_of_all(model->parameters()) == std::vector<double>{1, 2, 3, 4, -1.5, -5});
        CHECK(numbers_of_all(model->buffers()) == std::vector<double>{5, 6, 7, 8});
    });
    for (std::string const shares : {"low", "sin"}) {
        joinable::SelfCommunicator comm;
        Rotated model{shares};
        std::string const text = refusal([&] {
            joinable::torch::ShardedDataParallel{
                comm, model, joinable::Sgd{}, {.sharding = Sharding::parameters}
            };
        });
        CHECK(text.starts_with(shares + " shares the memory of scale, which Sharding::parameters"));
    }
}

TEST_CASE("each mistake with values of a libtorch module in parts is answered by a sentence") {
    for (bool const both : {true, false}) {
        joinable::SelfCommunicator comm;
        SharedStorage shared{both};
        std::string const text = refusal([&] {
            joinable::torch::ShardedDataParallel{
                comm, shared, joinable::Sgd{}, {.sharding = Sharding::parameters}
            };
        });
        CHECK(text.starts_with(
            both
                ? "high shares the memory of low, which Sharding::parameters frees between its uses"
                : "parameter low is a part of a larger tensor, whose memory Sharding::parameters would free"
        ));
    }
    auto const is_told = [&](std::string const& expected, auto const& mistake) {
        CAPTURE(expected);
        joinable::SelfCommunicator comm;
        auto model = deep_net();
        joinable::Sgd const rule{.learning_rate = 0.1};
        using Sharded =
            decltype(joinable::torch::ShardedDataParallel{comm, model, rule, each_layer});
        std::optional<Sharded> sharded;
        sharded.emplace(comm, model, rule, each_layer);
        std::string const text = refusal([&] { mistake(sharded, model); });
        CAPTURE(text);
        CHECK(text.find(expected) != std::string::npos);
    };
    Tensor const inputs = deep_inputs(0, 0);
    auto const layer = [](torch::nn::Sequential& model, std::size_t k) -> torch::nn::LinearImpl& {
        return model->at<torch::nn::LinearImpl>(k);
    };
    auto const runs_all = [&](auto& sharded, auto& model) {
        return sharded->forward([&] {
            Tensor x = inputs;
            for (auto& one : *model) {
                auto const held = sharded->use(one.ptr());
                x = one.forward(x);
            }
            return x;
        });
    };
    is_told(
        "reads a parameter of extents [4, 4], of which this rank keeps only a part",
        [&](auto& sharded, auto&) { sharded->forward(inputs); }
    );
    is_told("reads a parameter of extents [4, 4]", [&](auto& sharded, auto& model) {
        runs_all(sharded, model);
        static_cast<void>(layer(model, 2).weight.sum());
    });
    auto const is_told_of_storage = [&](auto const& convert) {
        for (bool const in_pass : {true, false}) {
            is_told(
                "parameter 0.weight has another type, layout or storage than when the ShardedDataParallel was made",
                [&](auto& sharded, auto& model) {
                    {
                        auto const all = sharded->use_all();
                        torch::NoGradGuard const no_graph;
                        convert(model, layer(model, 0).weight);
                    }
                    if (in_pass) {
                        torch::NoGradGuard const no_graph;
                        runs_all(sharded, model);
                    } else {
                        static_cast<void>(sharded->use_all());
                    }
                }
            );
        }
    };
    is_told_of_storage([](auto& model, Tensor&) { model->to(torch::kHalf); });
    is_told_of_storage([](auto&, Tensor& weight) {
        weight.set_(torch::ones({4, 4}, torch::kDouble).t());
    });
    is_told_of_storage([](auto&,
                          Tensor& weight) { // as torch::load() of weights that were one tensor
        weight.set_(torch::ones({20}, torch::kDouble).narrow(0, 4, 16).view({4, 4}));
    });
    is_told("are used outside a pass", [&](auto& sharded, auto& model) {
        static_cast<void>(sharded->use(model->ptr(0)));
    });
    is_told(
        "pass is past unit 0 (parameters 0 to 1), but uses it again",
        [&](auto& sharded, auto& model) {
            sharded->forward([&] {
                static_cast<void>(sharded->use(model->ptr(1)));
                static_cast<void>(sharded->use(model->ptr(0)));
                return inputs;
            });
        }
    );
    is_told(
        "use(): weight is no parameter of the module of this ShardedDataParallel",
        [&](auto& sharded, auto&) {
            sharded->forward([&] {
                static_cast<void>(sharded->use(torch::nn::Linear{4, 4}));
                return inputs;
            });
        }
    );
    is_told(
        "Sharding::parameters reads the graph of what forward() returns",
        [&](auto& sharded, auto&) { sharded->forward([&] {}); }
    );
    is_told("is still held; let go of it", [&](auto& sharded, auto& model) {
        std::optional<typename std::remove_reference_t<decltype(*sharded)>::HeldValues> held;
        Tensor const outputs = sharded->forward([&] {
            held.emplace(sharded->use(model->ptr(0)));
            return layer(model, 0).forward(inputs);
        });
        outputs.sum().backward();
    });
    is_told("use() was called while gradients are off", [&](auto& sharded, auto& model) {
        sharded->forward([&] {
            torch::NoGradGuard const no_graph;
            static_cast<void>(sharded->use(model->ptr(0)));
            return inputs;
        });
    });
    is_told("has a node of another thread (", [&](auto& sharded, auto& model) {
        sharded->forward([&] {
            auto const held = sharded->use(model);
            Tensor outputs;
            std::thread{[&] { outputs = model->forward(inputs); }}.join();
            return outputs;
        });
    });
    is_told("(create_graph), which would not be averaged", [&](auto& sharded, auto& model) {
        runs_all(sharded, model).sum().backward({}, true, true);
    });
    is_told(
        "torch::autograd::grad() of outputs needs Sharding::gradients",
        [&](auto& sharded, auto& model) {
            Tensor const started = inputs.clone().requires_grad_(true);
            Tensor const outputs = sharded->forward([&] {
                auto const held = sharded->use(model->ptr(0));
                return layer(model, 0).forward(started);
            });
            static_cast<void>(torch::autograd::grad({outputs.sum()}, {started}));
        }
    );
    is_told("its backward pass has been", [&](auto& sharded, auto& model) {
        Tensor const loss = runs_all(sharded, model).sum();
        loss.backward({}, true);
        sharded->step();
        loss.backward();
    });
    is_told(
        "a backward pass reaches layers of an earlier forward pass",
        [&](auto& sharded, auto& model) {
            Tensor const carried = runs_all(sharded, model);
            carried.sum().backward({}, true);
            sharded->step();
            sharded
                ->forward([&] {
                    auto const held = sharded->use(model->ptr(0));
                    return layer(model, 0).forward(carried);
                })
                .sum()
                .backward();
        }
    );
    is_told("the ShardedDataParallel was destroyed", [&](auto& sharded, auto& model) {
        Tensor const loss = runs_all(sharded, model).sum();
        sharded.reset();
        loss.backward();
    });
}

} // namespace
