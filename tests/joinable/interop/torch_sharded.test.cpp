// SPDX-License-Identifier: BSL-1.0
// libtorch modules with sharded state and gradients. The oracle: libtorch itself, on one rank, over all samples.
#include <joinable/interop/torch_sharded.hpp>

#include <torch/torch.h> // before doctest: both have a macro CHECK

#include <cmath>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <support/ranks.hpp>
#include <support/torch_small_net.hpp>

#include <joinable/communicator/self.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/zero.hpp>

namespace {

using joinable::ContractViolation;
using joinable::ShardedOptions;
using joinable::Sharding;
using joinable::ThreadCommunicator;
using joinable_tests::run_ranks;
using namespace joinable_tests::small_net;
using torch::Tensor;

auto const adam = [](std::vector<Tensor> mine) {
    return torch::optim::Adam{std::move(mine), torch::optim::AdamOptions{0.1}};
};

template <class Sharded>
void set_rate(Sharded& sharded, double rate) {
    if constexpr (requires { sharded.local(); }) {
        sharded.local().param_groups()[0].options().set_lr(rate);
    } else {
        sharded.rule().learning_rate = rate;
    }
}

/// Trains in rounds of `passes` batches, all but the last of them without a sum.
template <class Sharded, class F>
std::vector<double> train_with(
    ThreadCommunicator& comm, SmallNet& model, Sharded& sharded, int passes, F const& before_step
) {
    std::vector<double> losses;
    joinable::Join guard{joinable::participants(sharded), {.carry_accumulated = false}};
    for (int round = 0; round < rounds_of(comm.rank()); ++round) {
        bool const syncs = round % passes == passes - 1;
        if (round % passes == 0) {
            model->zero_grad(true);
        }
        Tensor const loss = loss_of(
            sharded.forward({.will_sync = syncs}, inputs_of(comm.rank(), round)), comm.rank(), round
        );
        loss.backward();
        losses.push_back(loss.template item<double>());
        if (syncs) {
            set_rate(sharded, rate_of(round));
            before_step();
            sharded.step();
        }
    }
    guard.finish();
    return losses;
}

template <class Rule>
void check_sharded(Rule const& rule, ShardedOptions const& options, double max_norm = 0) {
    run_ranks({1, 2, 3, 4}, [&](ThreadCommunicator& comm) {
        CAPTURE(comm.size());
        Training const expected = train_alone(comm.size(), adam, [&](SmallNet& net) {
            if (max_norm != 0) {
                torch::nn::utils::clip_grad_norm_(net->parameters(), max_norm);
            }
        });
        SmallNet model;
        if (comm.rank() != 0) {
            torch::NoGradGuard const no_graph;
            model->first->weight.mul_(2);
        }
        joinable::torch::ShardedDataParallel sharded{comm, model, rule, options};
        auto const losses = train_with(comm, model, sharded, 1, [&] {
            if (max_norm != 0) {
                sharded.clip_grad_norm_(max_norm);
            }
        });
        check_close(numbers_of(*model), expected.values, 1e-9);
        if (comm.rank() == 0) {
            check_close(losses, expected.losses, 1e-9);
        }
        CHECK((sharded.grad_norm() > max_norm) == (max_norm != 0));
    });
}

TEST_CASE("a sharded libtorch module trains on uneven inputs as one process does on their union") {
    for (Sharding const sharding : {Sharding::none, Sharding::optimizer, Sharding::gradients}) {
        CAPTURE(static_cast<int>(sharding));
        ShardedOptions const options{
            .sharding = sharding, .bucket_cap_bytes = 100, .sync_at_end = false
        };
        check_sharded(joinable::Adam{}, options);
        check_sharded(adam, options);
        check_sharded(joinable::Adam{}, options, 0.05);
        check_sharded(adam, options, 0.05);
    }
    check_sharded(
        joinable::Adam{},
        {.sharding = Sharding::gradients, .bucket_cap_bytes = 100, .sync_at_end = false}
    );
}

TEST_CASE("owners of a libtorch module step while the backward pass runs") {
    run_ranks({1, 2, 3}, [&](ThreadCommunicator& comm) {
        Training const expected = train_alone(comm.size(), adam);
        SmallNet model;
        joinable::torch::ShardedDataParallel sharded{
            comm,
            model,
            joinable::Adam{},
            {.sharding = Sharding::gradients, .bucket_cap_bytes = 100, .step_in_backward = true}
        };
        joinable::Join guard{joinable::participants(sharded)};
        for (int round = 0; round < rounds_of(comm.rank()); ++round) {
            sharded.rule().learning_rate = rate_of(round);
            loss_of(sharded.forward(inputs_of(comm.rank(), round)), comm.rank(), round).backward();
            sharded.step();
        }
        guard.finish();
        check_close(numbers_of(*model), expected.values, 1e-9);
        CHECK(refusal([&] { sharded.clip_grad_norm_(1); }
        ).starts_with("clip_grad_norm_() needs all gradients before the first parameter"));
    });
}

TEST_CASE("gradients of a libtorch module that no round sums accumulate, in each sharding") {
    constexpr int passes = 2;
    for (Sharding const sharding : {Sharding::optimizer, Sharding::gradients}) {
        run_ranks({1, 2, 3}, [&](ThreadCommunicator& comm) {
            SmallNet alone;
            auto optimizer = adam(alone->parameters());
            for (int round = 0; round < rounds; round += passes) {
                optimizer.zero_grad();
                for (int pass = round; pass < round + passes; ++pass) {
                    for (int rank = 0; rank < comm.size() && pass < rounds_of(rank); ++rank) {
                        Tensor const outputs = alone->forward(inputs_of(rank, pass));
                        (loss_of(outputs, rank, pass) / comm.size()).backward();
                    }
                }
                optimizer.param_groups()[0].options().set_lr(rate_of(round + passes - 1));
                optimizer.step();
            }
            SmallNet model;
            joinable::torch::ShardedDataParallel sharded{
                comm, model, adam, {.sharding = sharding, .bucket_cap_bytes = 100}
            };
            static_cast<void>(train_with(comm, model, sharded, passes, [] {}));
            check_close(numbers_of(*model), numbers_of(*alone));
        });
    }
}

TEST_CASE("a rank keeps the averages that it owns alone, and libtorch's gradients are released") {
    run_ranks({1, 2, 3, 4}, [](ThreadCommunicator& comm) {
        SmallNet model;
        joinable::torch::ShardedDataParallel sharded{
            comm, model, adam, {.sharding = Sharding::gradients}
        };
        std::size_t owned = 0;
        auto const parameters = model->parameters();
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            bool const is_owner = sharded.owner_of(i) == comm.rank();
            owned += is_owner ? static_cast<std::size_t>(parameters[i].numel()) : 0;
        }
        loss_of(sharded.forward(inputs_of(comm.rank(), 0)), comm.rank(), 0).backward();
        for (Tensor const& parameter : parameters) {
            CHECK(!parameter.grad().defined());
        }
        sharded.step();
        CHECK(sharded.gradient_bytes() == owned * sizeof(double));
        CHECK(sharded.state_bytes() == 2 * owned * sizeof(double));
    });
}

TEST_CASE("a norm is clipped in one step of a sharded libtorch module") {
    run_ranks({1, 2, 3}, [](ThreadCommunicator& comm) {
        SmallNet model;
        joinable::torch::ShardedDataParallel sharded{
            comm, model, joinable::Sgd{.learning_rate = 1}, {.sharding = Sharding::gradients}
        };
        auto const moved_by = [&] {
            std::vector<double> const before = numbers_of(*model);
            loss_of(sharded.forward(inputs_of(0, 0)), 0, 0).backward();
            sharded.step();
            double squares = 0;
            std::size_t i = 0;
            for (double const value : numbers_of(*model)) {
                squares += (value - before[i]) * (value - before[i]);
                ++i;
            }
            return std::sqrt(squares);
        };
        sharded.clip_grad_norm_(1e-3);
        CHECK(std::abs(moved_by() - 1e-3) < 1e-7);
        CHECK(moved_by() > 2e-3);
    });
}

TEST_CASE("a refused use_all() leaves the values that a backward pass gathers") {
    run_ranks({1, 2, 3}, [](ThreadCommunicator& comm) {
        torch::nn::Linear model{3, 2};
        joinable::torch::ShardedDataParallel sharded{
            comm, model, joinable::Sgd{}, {.sharding = Sharding::parameters}
        };
        Tensor const outputs = sharded.forward([&] {
            auto const held = sharded.use(model);
            return model->forward(torch::ones({2, 3}, torch::requires_grad()));
        });
        CHECK(refusal([&] { static_cast<void>(sharded.use_all()); }
        ).starts_with("use_all() was called in a guard or in a round"));
        CHECK(refusal([&] { outputs.sum().backward(); }).empty());
        CHECK(refusal([&] { sharded.step(); }).empty());
    });
}

TEST_CASE("ranks that clip one step differently are told so, and nothing is stepped") {
    for (bool const differs_in_type : {false, true}) {
        for (Sharding const sharding : {Sharding::none, Sharding::optimizer, Sharding::gradients}) {
            run_ranks({2, 3, 4, 8}, [&](ThreadCommunicator& comm) {
                SmallNet model;
                joinable::torch::ShardedDataParallel sharded{
                    comm, model, adam, {.sharding = sharding}
                };
                bool const is_last = comm.rank() == comm.size() - 1;
                std::vector<double> const before = numbers_of(*model);
                loss_of(sharded.forward(inputs_of(0, 0)), 0, 0).backward();
                if (differs_in_type) {
                    sharded.clip_grad_norm_(1, is_last ? 1 : 2);
                } else {
                    sharded.clip_grad_norm_(is_last ? 0.5 : 1);
                }
                std::string text;
                try {
                    sharded.step();
                } catch (joinable::Mismatch const& error) {
                    text = error.what();
                }
                CHECK(
                    text.find(
                        differs_in_type
                            ? ": max_norm from 1 to 1, norm_type from 1 to 2, here 1 and "
                            : ": max_norm from 0.5 to 1, norm_type from 2 to 2, here "
                    ) != std::string::npos
                );
                CHECK(numbers_of(*model) == before);
            });
        }
    }
}

TEST_CASE("ranks that clip a step differently after one has joined are told so, too") {
    for (bool const lowest_forgets : {false, true}) {
        run_ranks({3, 4}, [&](ThreadCommunicator& comm) {
            SmallNet model;
            joinable::torch::ShardedDataParallel sharded{comm, model, adam};
            std::vector<double> const before = numbers_of(*model);
            auto const train = [&] {
                joinable::Join guard{joinable::participants(sharded)};
                if (comm.rank() != comm.size() - 1) { // the last rank joins
                    loss_of(sharded.forward(inputs_of(0, 0)), 0, 0).backward();
                    if (comm.rank() == 1) {
                        sharded.clip_grad_norm_(0.5);
                    } else if (!lowest_forgets) {
                        sharded.clip_grad_norm_(1);
                    }
                    sharded.step();
                }
                guard.finish();
            };
            if (!lowest_forgets || comm.rank() == 1) {
                CHECK_THROWS_AS(train(), joinable::Mismatch);
            } else {
                CHECK_THROWS_AS(train(), joinable::Error);
            }
            if (!lowest_forgets) {
                CHECK(numbers_of(*model) == before);
            }
        });
    }
}

TEST_CASE(
    "a batch that fails within autograd is skipped, or the others hear of it, in each sharding"
) {
    for (Sharding const sharding : {Sharding::optimizer, Sharding::gradients}) {
        for (bool const skips : {true, false}) {
            run_ranks({1, 2, 3}, [&](ThreadCommunicator& comm) {
                SmallNet model;
                joinable::torch::ShardedDataParallel sharded{
                    comm, model, adam, {.sharding = sharding, .bucket_cap_bytes = 100}
                };
                bool const fails = comm.rank() == comm.size() - 1;
                std::string const text = train_or_skip(sharded, skips, [&](int round) {
                    model->zero_grad(true);
                    Tensor const outputs = sharded.forward([&] {
                        Tensor const result = model->forward(inputs_of(comm.rank(), round));
                        return fails && round == 1 ? ThrowsInBackward::apply(result) : result;
                    });
                    return loss_of(outputs, comm.rank(), round);
                });
                bool const is_told =
                    text.find("a batch that cannot be differentiated") != std::string::npos;
                CHECK(is_told == !skips);
                if (skips) {
                    std::vector<double> values = numbers_of(*model);
                    joinable::broadcast(comm, values, 0).wait();
                    CHECK(values == numbers_of(*model));
                }
            });
        }
    }
}

TEST_CASE("what a sharded libtorch module cannot do is said in a sentence") {
    run_ranks({1, 2, 3}, [](ThreadCommunicator& comm) {
        torch::nn::Embedding words{torch::nn::EmbeddingOptions{4, 2}.sparse(true)};
        CHECK(
            refusal([&] { joinable::torch::ShardedDataParallel{comm, words, adam}; }) ==
            "parameter weight has sparse gradients, which torch::ShardedDataParallel does not step; give the layer "
            "sparse(false)"
        );
    });
    joinable::SelfCommunicator alone;
    SmallNet model;
    joinable::torch::ShardedDataParallel sharded{alone, model, adam};
    CHECK(refusal([&] { sharded.clip_grad_norm_(1, -1); }).find("above 0") != std::string::npos);
    CHECK(refusal([&] {
              sharded.clip_grad_norm_(std::nan(""));
          }) == "clip_grad_norm_(): max_norm is not a number");
    CHECK(refusal([&] { sharded.step(); }).starts_with("step() follows a backward pass"));
    CHECK(refusal([&] { model->forward(inputs_of(0, 0)).sum().backward(); }
    ).starts_with("gradients became ready, but no forward() of the ShardedDataParallel came"));
    model->register_module("late", torch::nn::Linear{2, 2});
    std::string const late =
        refusal([&] { joinable::Join const guard{joinable::participants(sharded)}; });
    CHECK(
        late.find("came into the module after the ShardedDataParallel was made") !=
        std::string::npos
    );
    CHECK(late.ends_with("make the ShardedDataParallel after the module has all its layers"));
}

TEST_CASE("no text tells to call refresh() of a sharded libtorch module, which has none") {
    run_ranks({1, 2, 3}, [](ThreadCommunicator& comm) {
        SmallNet model;
        Tensor const bias = model->first->bias;
        bias.set_requires_grad(false);
        joinable::torch::ShardedDataParallel sharded{comm, model, joinable::Adam{}};
        bias.set_requires_grad(true); // on all ranks, so each one throws its own
        std::string const unfrozen = refusal([&] { sharded.forward(inputs_of(0, 0)); });
        CAPTURE(unfrozen);
        CHECK(unfrozen.ends_with(
            "so it would not be averaged; make the ShardedDataParallel after unfreezing"
        ));
    });
    run_ranks({1, 2, 3}, [](ThreadCommunicator& comm) {
        SmallNet model;
        joinable::torch::ShardedDataParallel sharded{comm, model, joinable::Adam{}};
        Tensor const bias = model->first->bias;
        bias.set_requires_grad(false);
        std::string const frozen = refusal([&] {
            sharded.forward(inputs_of(0, 0)).sum().backward();
            sharded.step();
        });
        CAPTURE(frozen);
        CHECK(frozen.ends_with("make the model anew after freezing parameters"));
    });
    joinable::SelfCommunicator alone;
    SmallNet model;
    joinable::torch::ShardedDataParallel sharded{alone, model, joinable::Adam{}};
    model->to(torch::kFloat);
    model->to(torch::kDouble);
    CHECK(refusal([&] { sharded.forward(inputs_of(0, 0)); }
    ).ends_with("make the ShardedDataParallel after that"));
    model->to(torch::kFloat);
    CHECK(refusal([&] { sharded.forward(inputs_of(0, 0).to(torch::kFloat)); }
    ).ends_with("make the ShardedDataParallel after to()"));
}

} // namespace
