// SPDX-License-Identifier: BSL-1.0
// libtorch's optimizers with sharded state. The oracle: libtorch itself, on one rank, over all samples.
#include <joinable/interop/torch_optimizer.hpp>

#include <torch/torch.h> // before doctest: both have a macro CHECK

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <unistd.h>

#include <support/ranks.hpp>
#include <support/torch_small_net.hpp>

#include <joinable/checkpoint.hpp>
#include <joinable/interop/torch.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/participant/step.hpp>
#include <joinable/zero.hpp>

namespace {

using joinable::ContractViolation;
using joinable::ThreadCommunicator;
using joinable::ZeroOptions;
using joinable_tests::run_ranks;
using namespace joinable_tests::small_net;
using torch::Tensor;

using Ddp = joinable::torch::DistributedDataParallel<ThreadCommunicator, SmallNetImpl>;

template <class Zero>
std::vector<double> train_with(
    ThreadCommunicator& comm, SmallNet& model, Ddp* ddp, Zero& zero, int begin = 0, int end = rounds
) {
    std::vector<double> losses;
    auto const train = [&](auto& guard) {
        for (int round = begin; round < end && round < rounds_of(comm.rank()); ++round) {
            zero.local().param_groups()[0].options().set_lr(rate_of(round));
            Tensor const loss = zero.step([&] {
                model->zero_grad(true);
                Tensor const inputs = inputs_of(comm.rank(), round);
                Tensor const outputs =
                    ddp != nullptr ? ddp->forward(inputs) : model->forward(inputs);
                Tensor const result = loss_of(outputs, comm.rank(), round);
                result.backward();
                return result;
            });
            losses.push_back(loss.item<double>());
        }
        guard.finish();
    };
    if (ddp != nullptr) {
        joinable::Join guard{joinable::participants(*ddp, zero)};
        train(guard);
    } else {
        joinable::Join guard{joinable::participants(zero)};
        train(guard);
    }
    return losses;
}

template <class Factory>
void check_optimizer(Factory const& factory) {
    run_ranks({1, 2, 3, 4}, [&](ThreadCommunicator& comm) {
        Training const expected = train_alone(comm.size(), factory);
        SmallNet model;
        joinable::torch::DistributedDataParallel ddp{
            comm, model, {.first_bucket_bytes = 64, .find_unused = true}
        };
        joinable::torch::Optimizer zero{comm, model->parameters(), factory};
        auto const losses = train_with(comm, model, &ddp, zero);
        check_close(numbers_of(*model), expected.values);
        if (comm.rank() == 0) {
            check_close(losses, expected.losses);
        }
    });
}

TEST_CASE("sharded, libtorch's optimizers step as they do alone, also when ranks have joined") {
    namespace optim = torch::optim;
    check_optimizer([](std::vector<Tensor> mine) {
        return optim::SGD{std::move(mine), optim::SGDOptions{0.1}};
    });
    check_optimizer([](std::vector<Tensor> mine) {
        return optim::SGD{
            std::move(mine), optim::SGDOptions{0.1}.momentum(0.9).dampening(0.25).weight_decay(0.01)
        };
    });
    check_optimizer([](std::vector<Tensor> mine) {
        return optim::Adam{std::move(mine), optim::AdamOptions{0.1}.weight_decay(0.01)};
    });
    check_optimizer([](std::vector<Tensor> mine) {
        return optim::Adam{std::move(mine), optim::AdamOptions{0.1}.amsgrad(true)};
    });
    check_optimizer([](std::vector<Tensor> mine) {
        return optim::AdamW{std::move(mine), optim::AdamWOptions{0.1}.betas({0.8, 0.99})};
    });
    check_optimizer([](std::vector<Tensor> mine) {
        return optim::RMSprop{
            std::move(mine), optim::RMSpropOptions{0.1}.momentum(0.5).centered(true)
        };
    });
    check_optimizer([](std::vector<Tensor> mine) {
        return optim::RMSprop{std::move(mine), optim::RMSpropOptions{0.1}};
    });
    check_optimizer([](std::vector<Tensor> mine) {
        return optim::Adagrad{
            std::move(mine), optim::AdagradOptions{0.1}.initial_accumulator_value(0.5).lr_decay(0.1)
        };
    });
}

TEST_CASE("what the body of a Step does to gradients and to the rate, joined ranks do, too") {
    auto const sgd = [](std::vector<Tensor> all) {
        return torch::optim::SGD{std::move(all), torch::optim::SGDOptions{0.1}.momentum(0.5)};
    };
    auto const clip = [](SmallNet& model) {
        static_cast<void>(torch::nn::utils::clip_grad_norm_(model->parameters(), 0.05));
    };
    run_ranks({1, 2, 3, 4, 8}, [&](ThreadCommunicator& comm) {
        SmallNet model;
        auto optimizer = sgd(model->parameters());
        joinable::torch::DistributedDataParallel ddp{comm, model, {.find_unused = true}};
        int steps = 0;
        joinable::Step step{comm, [&] {
                                clip(model);
                                optimizer.param_groups()[0].options().set_lr(rate_of(steps++));
                                optimizer.step();
                            }};
        joinable::Join guard{joinable::participants(ddp, step)};
        for (int round = 0; round < rounds_of(comm.rank()); ++round) {
            model->zero_grad(true);
            loss_of(ddp.forward(inputs_of(comm.rank(), round)), comm.rank(), round).backward();
            step.step();
        }
        guard.finish();
        std::vector<double> const expected = train_alone(comm.size(), sgd, clip).values;
        check_close(numbers_of(*model), expected);
        CHECK(expected != train_alone(comm.size(), sgd).values); // it does clip
    });
}

auto const adam = [](std::vector<Tensor> mine) {
    return torch::optim::Adam{std::move(mine), torch::optim::AdamOptions{0.1}.weight_decay(0.01)};
};

TEST_CASE("an optimizer of libtorch steps by gradients that are averaged only to their owners") {
    run_ranks({1, 2, 3, 4}, [&](ThreadCommunicator& comm) {
        // Each parameter is stepped, so the one that no pass uses decays.
        auto const without_decay = [](std::vector<Tensor> mine) {
            return torch::optim::Adam{std::move(mine), torch::optim::AdamOptions{0.1}};
        };
        Training const expected = train_alone(comm.size(), without_decay);
        SmallNet model;
        ZeroOptions const options{.bucket_cap_bytes = 100, .reduces_gradients = true};
        joinable::torch::Optimizer zero{comm, model->parameters(), without_decay, options};
        auto const losses = train_with(comm, model, nullptr, zero);
        check_close(numbers_of(*model), expected.values);
        if (comm.rank() == 0) {
            check_close(losses, expected.losses);
        }
    });
}

TEST_CASE("each rank has an optimizer of libtorch for what it owns, and the state of that alone") {
    run_ranks({1, 2, 3, 4}, [&](ThreadCommunicator& comm) {
        SmallNet model;
        int calls = 0;
        std::size_t given = 0;
        joinable::torch::Optimizer zero{comm, model->parameters(), [&](std::vector<Tensor> mine) {
                                            ++calls;
                                            given = mine.size();
                                            return adam(std::move(mine));
                                        }};
        std::size_t owned = 0;
        std::int64_t elements = 0;
        auto const parameters = model->parameters();
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            parameters[i].mutable_grad() = torch::ones_like(parameters[i]);
            owned += zero.owner_of(i) == comm.rank() ? 1U : 0U;
            elements += zero.owner_of(i) == comm.rank() ? parameters[i].numel() : 0;
        }
        zero.step();
        CHECK(calls == 1);
        CHECK(given == owned);
        CHECK(zero.local().state().size() == owned);
        CHECK(zero.state_bytes() == static_cast<std::size_t>(elements) * 2 * sizeof(double));
    });
}

TEST_CASE("a scheduler of libtorch sets the rate of all ranks, and joined ranks follow it") {
    run_ranks({1, 2, 3}, [&](ThreadCommunicator& comm) {
        SmallNet model;
        joinable::torch::Optimizer zero{
            comm, model->parameters(), adam, ZeroOptions{.reduces_gradients = true}
        };
        torch::optim::StepLR schedule{zero.local(), 1, 0.5};
        {
            joinable::Join guard{joinable::participants(zero)};
            for (int round = 0; round < 3 + comm.rank(); ++round) {
                for (Tensor const& parameter : model->parameters()) {
                    parameter.mutable_grad() = torch::ones_like(parameter);
                }
                zero.step();
                schedule.step();
            }
            guard.finish();
        }
        double const rate = zero.local().param_groups()[0].options().get_lr();
        CHECK(rate == std::ldexp(0.1, -(3 + comm.size() - 2))); // StepLR's first step sets 0.1
    });
}

TEST_CASE("a scheduler that before_step steps is at the same place on joined ranks, in each guard"
) {
    auto const sgd = [](std::vector<Tensor> all) {
        return torch::optim::SGD{std::move(all), torch::optim::SGDOptions{0.5}};
    };
    auto const set_gradients = [](SmallNet const& net, double gradient) {
        for (Tensor const& parameter : net->parameters()) {
            parameter.mutable_grad() = torch::full_like(parameter, gradient);
        }
    };
    run_ranks({1, 2, 3}, [&](ThreadCommunicator& comm) {
        SmallNet alone;
        auto optimizer = sgd(alone->parameters());
        torch::optim::StepLR schedule_alone{optimizer, 2, 0.5};
        SmallNet model;
        std::optional<torch::optim::StepLR> schedule;
        auto const before_step = [&](joinable::ShardGradients const&) {
            schedule->step();
            return true;
        };
        joinable::torch::Optimizer zero{
            comm,
            model->parameters(),
            sgd,
            ZeroOptions{.reduces_gradients = true, .before_step = before_step}
        };
        schedule.emplace(zero.local(), 2, 0.5);
        for (int epoch = 0; epoch < 2; ++epoch) {
            joinable::Join guard{joinable::participants(zero)};
            for (int round = 0; round < 3 + comm.rank(); ++round) {
                set_gradients(model, 1);
                zero.step();
            }
            guard.finish();
            for (int round = 0; round < 2 + comm.size(); ++round) {
                int const joined = std::max(0, round - 2);
                set_gradients(alone, static_cast<double>(comm.size() - joined) / comm.size());
                schedule_alone.step();
                optimizer.step();
            }
            check_close(numbers_of(*model), numbers_of(*alone));
        }
    });
}

template <class Factory>
void check_resumed(Factory const& factory, char const* name) {
    auto const file = std::filesystem::temp_directory_path() /
                      ("joinable_torch_" + std::string{name} + "_" + std::to_string(getpid()));
    for (int const readers : {1, 2, 3}) {
        run_ranks({2}, [&](ThreadCommunicator& comm) {
            SmallNet model;
            joinable::torch::DistributedDataParallel ddp{comm, model, {.find_unused = true}};
            joinable::torch::Optimizer zero{comm, joinable::torch::parameters(model), factory};
            static_cast<void>(train_with(comm, model, &ddp, zero, 0, 5));
            joinable::Checkpoint save{zero, file};
            save.write();
        });
        // Each computes the gradients of both.
        run_ranks({readers}, [&](ThreadCommunicator& comm) {
            Training const expected = train_alone(2, factory);
            SmallNet model;
            joinable::torch::Optimizer zero{comm, joinable::torch::parameters(model), factory};
            for (Tensor const& parameter : model->parameters()) {
                parameter.mutable_grad() = torch::ones_like(parameter); // has another state
            }
            zero.step();
            joinable::Checkpoint load{zero, file};
            load.read();
            CHECK(zero.local().param_groups()[0].options().get_lr() == rate_of(4));
            for (int round = 5; round < rounds; ++round) {
                zero.local().param_groups()[0].options().set_lr(rate_of(round));
                model->zero_grad(true);
                for (int rank = 0; rank < 2 && round < rounds_of(rank); ++rank) {
                    (loss_of(model->forward(inputs_of(rank, round)), rank, round) / 2).backward();
                }
                zero.step();
            }
            check_close(numbers_of(*model), expected.values);
        });
        std::filesystem::remove(file);
    }
}

TEST_CASE("a checkpoint has the state of libtorch's optimizers, for any number of ranks") {
    namespace optim = torch::optim;
    check_resumed(adam, "adam");
    check_resumed(
        [](std::vector<Tensor> mine) {
            return optim::SGD{std::move(mine), optim::SGDOptions{0.1}.momentum(0.9).dampening(0.5)};
        },
        "sgd"
    );
    check_resumed(
        [](std::vector<Tensor> mine) {
            return optim::Adagrad{
                std::move(mine),
                optim::AdagradOptions{0.1}.initial_accumulator_value(0.5).lr_decay(0.1)
            };
        },
        "adagrad"
    );
}

TEST_CASE("a checkpoint of libtorch's Adam is not read into its AdamW, which has as many settings"
) {
    auto const file = std::filesystem::temp_directory_path() /
                      ("joinable_torch_other_" + std::to_string(getpid()));
    run_ranks({1, 2}, [&](ThreadCommunicator& comm) {
        SmallNet model;
        joinable::torch::Optimizer zero{comm, model->parameters(), adam};
        joinable::Checkpoint{zero, file}.write();
        joinable::torch::Optimizer other{comm, model->parameters(), [](std::vector<Tensor> mine) {
                                             return torch::optim::AdamW{std::move(mine)};
                                         }};
        joinable::Checkpoint load{other, file};
        std::string text;
        try {
            load.read();
        } catch (joinable::ContractViolation const& error) {
            text = error.what();
        }
        std::string const wrong =
            "its setting optimizer of group 0 is \"Adam\", but here it is \"AdamW\"";
        CHECK(text.find(wrong) != std::string::npos);
    });
    std::filesystem::remove(file);
}

TEST_CASE("a factory that leaves aside the tensors it is given is refused, with one rank, too") {
    run_ranks({1}, [](ThreadCommunicator& comm) {
        SmallNet model;
        std::string text;
        try {
            joinable::torch::Optimizer zero{
                comm,
                model->parameters(),
                [&](std::vector<Tensor> const&) {
                    return torch::optim::SGD{model->parameters(), torch::optim::SGDOptions{0.1}};
                }
            };
        } catch (joinable::ContractViolation const& error) {
            text = error.what();
        }
        CHECK(text.find(" in 1 groups, with 0 of those given") != std::string::npos);
    });
}

TEST_CASE("a checkpoint from before the first step takes back the steps of libtorch's optimizer") {
    auto const file = std::filesystem::temp_directory_path() /
                      ("joinable_torch_first_" + std::to_string(getpid()));
    run_ranks({1, 2, 3}, [&](ThreadCommunicator& comm) {
        auto const momentum = [](std::vector<Tensor> mine) {
            return torch::optim::SGD{
                std::move(mine), torch::optim::SGDOptions{0.5}.momentum(0.5).dampening(0.5)
            };
        };
        SmallNet model;
        joinable::torch::Optimizer zero{comm, model->parameters(), momentum};
        joinable::Checkpoint first{zero, file};
        first.write();
        auto const step = [&](double gradient) {
            for (Tensor const& parameter : model->parameters()) {
                parameter.mutable_grad() = torch::full_like(parameter, gradient);
            }
            zero.step();
        };
        step(8);
        first.read();
        CHECK(numbers_of(*model) == numbers_of(*SmallNet{}));
        step(1);
        std::vector<double> expected = numbers_of(*SmallNet{});
        for (double& value : expected) {
            value -= 0.5; // the first buffer is the gradient, undamped
        }
        CHECK(numbers_of(*model) == expected);
    });
    std::filesystem::remove(file);
}

TEST_CASE("what is wrong with an optimizer of libtorch is said in a sentence") {
    run_ranks({1, 2, 3}, [&](ThreadCommunicator& comm) {
        SmallNet model;
        std::string const other_options = refusal([&] {
            joinable::torch::Optimizer{comm, model->parameters(), [&](std::vector<Tensor> mine) {
                                           return torch::optim::SGD{
                                               std::move(mine), 0.5 + comm.rank()
                                           };
                                       }};
        });
        CHECK((other_options.find("lr") != std::string::npos) == (comm.size() > 1));
        std::string const lost = refusal([&] {
            joinable::torch::Optimizer{comm, model->parameters(), [](std::vector<Tensor> const&) {
                                           return torch::optim::SGD{std::vector<Tensor>{}, 0.5};
                                       }};
        });
        CHECK(
            lost.find("give that of all of them in one group, and call add_parameter_group()") !=
            std::string::npos
        );
        bool const fails = comm.rank() == comm.size() - 1;
        std::string const failed = refusal([&] {
            joinable::torch::Optimizer{comm, model->parameters(), [&](std::vector<Tensor> mine) {
                                           if (fails) {
                                               throw std::domain_error{"no such optimizer"};
                                           }
                                           return adam(std::move(mine));
                                       }};
        });
        CHECK(failed.find("no such optimizer") != std::string::npos);
        std::string const integers = refusal([&] {
            joinable::torch::Optimizer{
                comm, std::vector<Tensor>{torch::ones({2}, torch::kInt)}, adam
            };
        });
        CHECK(integers.find("no parameter requires a gradient") != std::string::npos);

        joinable::torch::Optimizer zero{comm, model->parameters(), adam};
        zero.local().add_param_group(
            torch::optim::OptimizerParamGroup{std::vector<Tensor>{torch::ones({1})}}
        );
        CHECK(
            refusal([&] { zero.step(); }
            ).find("the local optimizer of a rank has got another group of parameters") !=
            std::string::npos
        );
    });
}

TEST_CASE("groups of libtorch's optimizers have options of their own") {
    run_ranks({1, 2, 3}, [&](ThreadCommunicator& comm) {
        auto const sgd = [](std::vector<Tensor> mine) {
            return torch::optim::SGD{
                std::move(mine), torch::optim::SGDOptions{0.5}.momentum(0.5).weight_decay(0.25)
            };
        };
        auto const plain = [](std::vector<Tensor> mine) {
            return torch::optim::SGD{std::move(mine), torch::optim::SGDOptions{0.25}};
        };
        SmallNet model;
        SmallNet alone;
        auto first = sgd(alone->first->parameters());
        auto second = plain(alone->second->parameters());
        joinable::torch::Optimizer zero{comm, model->first->parameters(), sgd};
        zero.add_parameter_group(model->second->parameters(), plain);
        for (int round = 0; round < 4; ++round) {
            for (SmallNet const& net : {model, alone}) {
                for (Tensor const& parameter : net->parameters()) {
                    parameter.mutable_grad() = torch::full_like(parameter, round - 1);
                }
            }
            zero.local(1).param_groups()[0].options().set_lr(0.25 + round);
            second.param_groups()[0].options().set_lr(0.25 + round);
            zero.step();
            first.step();
            second.step();
        }
        CHECK(numbers_of(*model) == numbers_of(*alone));
    });
}

TEST_CASE("what libtorch's optimizer throws on one owner is PeerFailed on all others") {
    run_ranks({2, 3, 4}, [&](ThreadCommunicator& comm) {
        SmallNet model;
        int const culprit = comm.size() - 1;
        joinable::torch::Optimizer zero{
            comm,
            model->parameters(),
            [&](std::vector<Tensor> mine) {
                return FailingSgd{std::move(mine), comm.rank() == culprit};
            },
            ZeroOptions{.reduces_gradients = true}
        };
        std::string text;
        try {
            joinable::Join guard{joinable::participants(zero)};
            for (int round = 0; round < (comm.rank() == culprit ? 1 : 4); ++round) {
                zero.step(); // the culprit fails while it shadows
            }
            guard.finish();
        } catch (joinable::PeerFailed const& error) {
            CHECK(comm.rank() != culprit);
            CHECK(error.rank() == culprit);
            text = error.what();
        } catch (std::domain_error const& error) {
            CHECK(comm.rank() == culprit);
            text = error.what();
        }
        CHECK(text.find("libtorch ran out of memory") != std::string::npos);
    });
}

} // namespace
