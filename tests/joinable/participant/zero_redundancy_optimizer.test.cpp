// SPDX-License-Identifier: BSL-1.0
// The sharded optimizer. The oracles: the whole optimizer on every rank beside the same reduction, bit for
// bit; a serial run in double; PyTorch's test_zero_redundancy_optimizer.py where it applies.
#include <joinable/participant/sharded/zero_redundancy_optimizer.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>

#include <over_ranks.hpp>
#include <support/alike.hpp>
#include <support/linear_model.hpp>
#include <support/numbers.hpp>
#include <support/recording_communicator.hpp>
#include <support/sharded_training.hpp>
#include <support/strided_param.hpp>
#include <support/volume.hpp>
#include <support/whole_optimizer.hpp>

#include <joinable/communicator/self.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/sharded/data_parallel.hpp>
#include <joinable/participant/step.hpp>

namespace {

using namespace joinable_tests;
using joinable::Adam;
using joinable::AdamW;
using joinable::ClipNorm;
using joinable::ContractViolation;
using joinable::DistributedDataParallel;
using joinable::DType;
using joinable::Join;
using joinable::Mismatch;
using joinable::participants;
using joinable::Partition;
using joinable::Sgd;
using joinable::Shape;
using joinable::ShardGradients;
using joinable::Step;
using joinable::ZeroOptions;
using joinable::ZeroRedundancyOptimizer;

template <class Comm, class Rule>
std::vector<Numbers> train_sharded(
    Comm& comm,
    Model const& model,
    Inputs const& inputs,
    Rule const& rule,
    ZeroOptions const& options = {}
) {
    return train(comm, model, inputs, [&](auto& params) {
        return ZeroRedundancyOptimizer{comm, params, rule, options};
    });
}

/// Every partition, with one bucket and with many.
std::vector<ZeroOptions> const all_options{
    {},
    {.bucket_cap_bytes = 64},
    {.partition = Partition::flat},
    {.partition = Partition::flat, .bucket_cap_bytes = 64},
};

/// Of these one under a sanitizer, in turn, else all.
std::vector<ZeroOptions> options_in_turn(std::size_t turn) {
    if (under_sanitizer) {
        return {all_options[turn % all_options.size()]};
    }
    return all_options;
}

TEST_CASE(
    "a sharded optimizer trains as the whole one on every rank, bit for bit, whichever rank runs out when" *
    doctest::test_suite("[long]")
) {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        std::size_t turn = static_cast<std::size_t>(comm.size());
        for (Inputs const& inputs : inputs_of) {
            for_each_rule([&](auto const& rule) {
                auto const whole = train_whole(comm, {}, inputs, rule);
                for (ZeroOptions const& options : options_in_turn(turn++)) {
                    CHECK(are_alike(train_sharded(comm, {}, inputs, rule, options), whole));
                }
            });
            ++turn;
        }
    });
}

TEST_CASE("every dtype, layout and choice of trained parameters is sharded") {
    over_ranks({1, 2, 3, 4}, [](RankCommunicator& comm) {
        Model const models[] = {
            {.dtype = DType::f64},
            {.dtype = DType::bf16},
            {.dtype = DType::f16, .has_strides = true},
            {.has_strides = true},
            {.dtype = DType::f64, .frozen = 1},
            {.is_large = true},
        };
        std::size_t turn = 0;
        for (Model const& model : models) {
            Adam const rule{.learning_rate = 0.02};
            auto const whole = train_whole(comm, model, inputs_of[1], rule);
            for (ZeroOptions const& options : all_options) {
                if (is_left_out(turn++, 3, comm.size())) {
                    continue;
                }
                CHECK(are_alike(
                    train_sharded(comm, model, inputs_of[1], rule, options), whole, model.dtype
                ));
            }
        }
    });
}

TEST_CASE("it gives what one rank computes in double from the averages") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        Inputs const& inputs = inputs_of[1];
        AdamW const rule{.learning_rate = 0.02, .weight_decay = 0.1};
        int const world = comm.size();
        std::vector<StridedParam> params = make({.dtype = DType::f64});
        WholeOptimizer serial{params, rule};
        for (int round = 0; round < inputs(world - 1); ++round) {
            for (std::size_t i = 0; i < params.size(); ++i) {
                params[i].need_grad();
                Numbers average(params[i].grad.numel());
                for (std::size_t k = 0; k < average.size(); ++k) {
                    for (int rank = 0; rank < world; ++rank) {
                        bool const is_active = round < inputs(rank);
                        average[k] += is_active ? gradient_of(rank, round, i, k) / world : 0.0;
                    }
                }
                write(params[i].grad, average);
            }
            serial.step();
        }
        for (ZeroOptions const& options : all_options) {
            auto const sharded = train_sharded(comm, {.dtype = DType::f64}, inputs, rule, options);
            auto const expected = values_of(params);
            for (std::size_t i = 0; i < expected.size(); ++i) {
                for (std::size_t k = 0; k < expected[i].size(); ++k) {
                    CHECK(std::abs(sharded[i][k] - expected[i][k]) < 1e-12);
                }
            }
        }
    });
}

// PyTorch: (-2.0, -1.5), because its joined rank steps by a gradient of its last own round.
TEST_CASE("a joined owner steps by the averages of the others") {
    for (bool const is_ddp_first : {true, false}) {
        over_ranks({2}, [&](RankCommunicator& comm) {
            std::vector<Param<float>> params = make_params<float>({1, 1});
            DistributedDataParallel ddp{comm, params};
            ZeroRedundancyOptimizer zero{comm, params, Sgd{.learning_rate = 1.0}};
            auto const train_in = [&](auto& guard) {
                for (int i = 0; i < 1 + comm.rank(); ++i) {
                    drop_gradients(params);
                    ddp.forward([] {});
                    ddp.backward([&](auto ready) {
                        for (std::size_t const k : {std::size_t{1}, std::size_t{0}}) {
                            add_gradient(params[k], 1.0);
                            ready(k);
                        }
                    });
                    zero.step();
                }
                guard.finish();
            };
            if (is_ddp_first) {
                Join guard{participants(ddp, zero)};
                train_in(guard);
            } else {
                Join guard{participants(zero, ddp)};
                train_in(guard);
            }
            CHECK(params[0].value[0] == -1.5F);
            CHECK(params[1].value[0] == -1.5F);
            CHECK(zero.owner_of(0) == 0);
            CHECK(zero.owner_of(1) == 1);
        });
    }
}

TEST_CASE("alone in a guard it averages gradients to their owners itself") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        std::size_t turn = static_cast<std::size_t>(comm.size());
        for (bool const is_weighted : {false, true}) {
            for (Inputs const& inputs : inputs_of) {
                auto const notice_of = [&](int round) {
                    auto const weight = static_cast<std::uint64_t>(1 + comm.rank() + round);
                    return is_weighted ? joinable::RoundNotice{.weight = weight}
                                       : joinable::RoundNotice{};
                };
                // Some gradients add up to zero, but for rounding, which a small epsilon would make steps of.
                AdamW const rule{.learning_rate = 0.05, .epsilon = 1e-2};
                std::vector<StridedParam> params = make({});
                DistributedDataParallel ddp{comm, params};
                WholeOptimizer whole{params, rule};
                Step step{comm, [&] { whole.step(); }};
                {
                    Join guard{participants(ddp, step)};
                    for (int round = 0; round < inputs(comm.rank()); ++round) {
                        ddp.forward([] {}, notice_of(round));
                        ddp.backward([&](auto ready) {
                            backward(params, {}, comm.rank(), round, ready);
                        });
                        step.step();
                    }
                    guard.finish();
                }
                for (ZeroOptions options : options_in_turn(turn++)) {
                    options.reduces_gradients = true;
                    std::vector<StridedParam> own = make({});
                    ZeroRedundancyOptimizer zero{comm, own, rule, options};
                    Join guard{participants(zero)};
                    for (int round = 0; round < inputs(comm.rank()); ++round) {
                        backward(own, {}, comm.rank(), round, [](std::size_t) {});
                        zero.step(notice_of(round));
                    }
                    guard.finish();
                    CHECK(are_alike(values_of(own), values_of(params)));
                }
            }
        }
    });
}

TEST_CASE("a guard in which nobody averages, or two do, is refused in a sentence") {
    over_ranks({1, 2}, [](RankCommunicator& comm) {
        std::vector<Param<float>> params = make_params<float>({3});
        DistributedDataParallel ddp{comm, params};
        ZeroRedundancyOptimizer zero{comm, params, Sgd{}};
        ZeroRedundancyOptimizer alone{comm, params, Sgd{}, {.reduces_gradients = true}};
        CHECK_THROWS_WITH_AS(
            (void)(Join{participants(zero)}),
            "no participant of this guard averages the gradients that ZeroRedundancyOptimizer steps by; "
            "add the DistributedDataParallel to participants(...), or set ZeroOptions::reduces_gradients",
            ContractViolation
        );
        CHECK_THROWS_WITH_AS(
            (void)(Join{participants(ddp, alone)}),
            "participant 0 (DistributedDataParallel) and participant 1 (ZeroRedundancyOptimizer) both average "
            "parameter 0, so it would be averaged twice in a round; let one participant average it: a "
            "DistributedDataParallel over both models, without ZeroOptions::reduces_gradients beside it",
            ContractViolation
        );
        std::vector<Param<float>> others = make_params<float>({2});
        DistributedDataParallel other{comm, others};
        CHECK_THROWS_WITH_AS(
            (void)(Join{participants(other, alone)}),
            "ZeroOptions::reduces_gradients averages gradients that another participant of this guard "
            "has averaged; leave the option out",
            ContractViolation
        );
    });
}

TEST_CASE("a parameter whose gradient nobody averages is refused when the guard begins") {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        std::vector<Param<float>> params = make_params<float>({3, 2, 4});
        std::vector<Param<float>*> const some{&params[0], &params[2]};
        params[1].name = "bias";
        DistributedDataParallel ddp{comm, some};
        ZeroRedundancyOptimizer zero{comm, params, Sgd{}};
        CHECK_THROWS_WITH_AS(
            Join(participants(ddp, zero)).finish(),
            "parameter 1 (bias) is stepped by ZeroRedundancyOptimizer, but no participant of this guard averages "
            "its gradient; give DistributedDataParallel the same parameters",
            ContractViolation
        );
        ZeroRedundancyOptimizer fewer{comm, some, Sgd{}};
        Join guard{participants(ddp, fewer)};
        guard.finish();
    });
}

TEST_CASE("a parameter that is frozen, or trained, after it was given is refused") {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        std::vector<Param<float>> params = make_params<float>({3, 2});
        params[0].requires_grad = false;
        ZeroRedundancyOptimizer zero{comm, params, Sgd{}};
        zero.step();
        params[1].requires_grad = false;
        CHECK_THROWS_WITH_AS(
            zero.step(),
            "parameter 1 requires no gradient any more, but did when it was given; make a new optimizer, or call refresh()",
            ContractViolation
        );
        params[0].requires_grad = true;
        params[1].requires_grad = true;
        CHECK_THROWS_WITH_AS(
            zero.step(),
            "parameter 0 requires a gradient now, but did not when it was given, so no rank steps it; make "
            "a new optimizer, or call refresh()",
            ContractViolation
        );
    });
}

TEST_CASE("rules of different classes are named, whatever their settings") {
    over_ranks({2, 3}, [](RankCommunicator& comm) {
        std::vector<Param<float>> params = make_params<float>({3});
        std::string text;
        try {
            if (comm.rank() == 1) {
                ZeroRedundancyOptimizer{comm, params, AdamW{.weight_decay = 0.0}};
            } else {
                ZeroRedundancyOptimizer{comm, params, Adam{}};
            }
        } catch (joinable::Mismatch const& error) {
            text = error.what();
        }
        CHECK(text.starts_with("options differ: class of the rule: rank 0 has joinable::"));
    });
}

TEST_CASE("the next step frees a state that was gathered") {
    over_ranks({1, 2}, [](RankCommunicator& comm) {
        std::vector<Param<float>> params = make_params<float>({3});
        ZeroRedundancyOptimizer zero{comm, params, Adam{}};
        zero.consolidate();
        zero.step();
        CHECK_THROWS_AS(static_cast<void>(zero.state()), ContractViolation);
    });
}

TEST_CASE("a gradient that lies in a value of another group is refused") {
    joinable::SelfCommunicator self;
    std::vector<StridedParam> params = make({});
    std::vector<StridedParam> more = make({});
    ZeroRedundancyOptimizer zero{self, params, Sgd{}};
    more[0].grad = params[0].value.view();
    CHECK_THROWS_WITH_AS(
        zero.add_parameter_group(more, Sgd{}),
        doctest::Contains("shares memory with the value of parameter 0"),
        ContractViolation
    );
    CHECK(zero.groups().size() == 1);
    more[0].grad = {};
    CHECK_NOTHROW(zero.add_parameter_group(more, Sgd{}));
}

TEST_CASE("after a group that one rank refused, joined ranks still get settings") {
    over_ranks({2, 3, 4}, [](RankCommunicator& comm) {
        std::vector<Param<float>> params = make_params<float>({1, 1});
        std::vector<Param<float>> more = make_params<float>({5, 1, 2});
        DistributedDataParallel ddp{comm, params};
        ZeroRedundancyOptimizer zero{comm, params, Sgd{.learning_rate = 1.0}};
        bool const refuses = comm.rank() == 1;
        CHECK_THROWS(zero.add_parameter_group(more, Sgd{.learning_rate = refuses ? -1.0 : 1.0}));
        Join guard{participants(ddp, zero)};
        for (int i = 0; i < comm.rank(); ++i) {
            drop_gradients(params);
            zero.rule().learning_rate = 1.0 + i;
            ddp.forward([] {});
            ddp.backward([&](auto ready) {
                for (std::size_t const k : {1U, 0U}) {
                    add_gradient(params[k], static_cast<double>(comm.size()));
                    ready(k);
                }
            });
            zero.step();
        }
        guard.finish();
        float expected = 0;
        for (int i = 0; i < comm.size() - 1; ++i) {
            expected -= static_cast<float>((comm.size() - 1 - i) * (1 + i));
        }
        CHECK(params[0].value[0] == doctest::Approx(expected));
        CHECK(params[1].value[0] == doctest::Approx(expected));
    });
}

TEST_CASE("a parameter without a gradient keeps its value, its state and its number of steps") {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        for (ZeroOptions const& options : all_options) {
            Adam const rule{.learning_rate = 0.1};
            std::vector<StridedParam> params = make({});
            std::vector<StridedParam> expected = make({});
            ZeroRedundancyOptimizer zero{comm, params, rule, options};
            WholeOptimizer whole{expected, rule};
            for (int round = 0; round < 5; ++round) {
                for (auto* model : {&params, &expected}) {
                    backward(*model, {}, 0, round, [](std::size_t) {});
                    if (round % 2 == 1) {
                        (*model)[1].grad = {};
                    }
                }
                zero.step();
                whole.step();
            }
            CHECK(values_of(params) == values_of(expected));
        }
    });
}

TEST_CASE("learning rates that change between steps reach joined owners") {
    over_ranks({2, 3, 4}, [](RankCommunicator& comm) {
        auto const rate = [](int round) { return 0.1 / (1 + round); };
        std::vector<StridedParam> params = make({});
        std::vector<StridedParam> expected = make({});
        DistributedDataParallel ddp{comm, params};
        DistributedDataParallel other{comm, expected};
        ZeroRedundancyOptimizer zero{comm, params, Adam{}};
        WholeOptimizer whole{expected, Adam{}};
        int rounds = 0;
        Step step{comm, [&] {
                      whole.rule.learning_rate = rate(rounds++);
                      whole.step();
                  }};
        Join guard{participants(ddp, zero, other, step)};
        for (int round = 0; round < 2 + 2 * comm.rank(); ++round) {
            ddp.forward([] {});
            ddp.backward([&](auto ready) { backward(params, {}, comm.rank(), round, ready); });
            other.forward([] {});
            other.backward([&](auto ready) { backward(expected, {}, comm.rank(), round, ready); });
            zero.rule().learning_rate = rate(round); // only ranks that are active set it
            zero.step();
            step.step();
        }
        guard.finish();
        CHECK(values_of(params) == values_of(expected));
    });
}

TEST_CASE(
    "settings that change after a step are those for the next step, on ranks that had joined, too"
) {
    over_ranks({2, 3, 4}, [](RankCommunicator& comm) {
        auto const train = [&](auto& optimizer, auto&& round, auto&... participants_of) {
            Join guard{participants(participants_of...)};
            for (int k = 0; k < 1 + comm.rank(); ++k) {
                round();
                optimizer.rule().learning_rate *= 0.5; // a schedule goes on after the step
            }
            guard.finish();
            double expected = 1;
            for (int k = 0; k < comm.size(); ++k) {
                expected *= 0.5;
            }
            CHECK(optimizer.rule().learning_rate == expected);
        };
        {
            std::vector<StridedParam> params = make({});
            DistributedDataParallel ddp{comm, params};
            ZeroRedundancyOptimizer zero{comm, params, Sgd{.learning_rate = 1}};
            train(
                zero,
                [&] {
                    ddp.forward([] {});
                    ddp.backward([&](auto ready) { backward(params, {}, comm.rank(), 0, ready); });
                    zero.step();
                },
                ddp,
                zero
            );
        }
        for (auto const sharding : {joinable::Sharding::optimizer, joinable::Sharding::gradients}) {
            std::vector<StridedParam> params = make({});
            joinable::ShardedDataParallel sharded{
                comm, params, Sgd{.learning_rate = 1}, {.sharding = sharding}
            };
            train(
                sharded,
                [&] {
                    sharded.forward([] {});
                    sharded.backward([&](auto ready) {
                        backward(params, {}, comm.rank(), 0, ready);
                    });
                    sharded.step();
                },
                sharded
            );
        }
    });
}

TEST_CASE("gradients are clipped by the norm of all of them, on joined owners too") {
    // What one rank has that clips the averages itself: the number of ranks changes no bit.
    auto const clipped = [](RankCommunicator& comm, ZeroOptions options, bool is_whole) {
        std::vector<StridedParam> params = make({});
        Adam const rule{.learning_rate = 0.05};
        WholeOptimizer whole{params, rule};
        DistributedDataParallel ddp{comm, params};
        Step step{comm, [&] {
                      CHECK(clip_whole(params, 0.5) < 1.0);
                      whole.step();
                  }};
        ClipNorm clip{0.5};
        options.before_step = std::ref(clip);
        ZeroRedundancyOptimizer zero{comm, params, rule, options};
        auto const train_in = [&](auto& guard, auto& optimizer) {
            for (int round = 0; round < inputs_of[1](comm.rank()); ++round) {
                ddp.forward([] {});
                ddp.backward([&](auto ready) { backward(params, {}, comm.rank(), round, ready); });
                optimizer.step();
            }
            guard.finish();
        };
        if (is_whole) {
            Join guard{participants(ddp, step)};
            train_in(guard, step);
        } else {
            Join guard{participants(ddp, zero)};
            train_in(guard, zero);
            CHECK(clip.norm() > 0.5);
        }
        return values_of(params);
    };
    over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
        auto const whole = clipped(comm, {}, true);
        for (ZeroOptions const& options : all_options) {
            auto const sharded = clipped(comm, options, false);
            if (options.partition == Partition::by_parameters) {
                CHECK(are_alike(sharded, whole));
                continue;
            }
            for (std::size_t i = 0; i < whole.size(); ++i) {
                for (std::size_t k = 0; k < whole[i].size(); ++k) {
                    CHECK(std::abs(sharded[i][k] - whole[i][k]) < 1e-6);
                }
            }
        }
    });
}

/// Scales losses, and halves the scale where a gradient became infinite: nobody steps then.
struct LossScale {
    double scale = 8;
    int skipped = 0;
};

TEST_CASE("an infinite gradient on one rank makes all ranks skip the step, joined owners too") {
    over_ranks({1, 2, 3, 4}, [](RankCommunicator& comm) {
        LossScale loss;
        auto const unscale = [&](ShardGradients const& gradients) {
            double infinite = 0;
            for (auto const& [parameter, view] : gradients) {
                Numbers numbers = read(view);
                for (double& number : numbers) {
                    infinite += std::isinf(number) ? 1 : 0;
                    number /= loss.scale;
                }
                write(view, numbers);
            }
            if (gradients.sum(infinite) == 0.0) {
                return true;
            }
            loss.scale /= 2;
            ++loss.skipped;
            return false;
        };
        std::vector<StridedParam> params = make({});
        std::vector<StridedParam> expected = make({});
        DistributedDataParallel ddp{comm, params};
        DistributedDataParallel other{comm, expected};
        ZeroRedundancyOptimizer zero{
            comm, params, Sgd{.learning_rate = 0.5}, {.before_step = unscale, .shared = {loss}}
        };
        WholeOptimizer whole{expected, Sgd{.learning_rate = 0.5}};
        int rounds = 0;
        Step step{comm, [&] {
                      if (rounds++ != 1) { // the round with the infinity
                          whole.step();
                      }
                  }};
        Join guard{participants(ddp, zero, other, step)};
        int const last = comm.size() - 1;
        for (int round = 0; round < (comm.rank() == last ? 4 : 1); ++round) {
            loss.scale *= 2; // only on ranks that are active
            ddp.forward([] {});
            ddp.backward([&](auto ready) {
                backward(params, {}, comm.rank(), round, [](std::size_t) {});
                for (std::size_t i = params.size(); i-- > 0;) {
                    Numbers numbers = read(params[i].grad);
                    for (double& number : numbers) {
                        number *= loss.scale;
                    }
                    if (round == 1 && i == 2) {
                        numbers[0] = std::numeric_limits<double>::infinity();
                    }
                    write(params[i].grad, numbers);
                    ready(i);
                }
            });
            other.forward([] {});
            other.backward([&](auto ready) { backward(expected, {}, comm.rank(), round, ready); });
            zero.step();
            step.step();
        }
        guard.finish();
        CHECK(loss.scale == 64.0);
        CHECK(loss.skipped == 1);
        CHECK(values_of(params) == values_of(expected));
    });
}

TEST_CASE(
    "LossScaler divides by its scale, and skips and changes it on all ranks, joined owners too"
) {
    over_ranks({1, 2, 3, 4}, [](RankCommunicator& comm) {
        joinable::LossScaler scaler{.scale = 8, .interval = 2};
        std::vector<StridedParam> params = make({});
        std::vector<StridedParam> expected = make({});
        DistributedDataParallel ddp{comm, params};
        DistributedDataParallel other{comm, expected};
        ZeroRedundancyOptimizer zero{
            comm,
            params,
            Sgd{.learning_rate = 0.5},
            {.before_step = std::ref(scaler), .shared = {scaler}}
        };
        WholeOptimizer whole{expected, Sgd{.learning_rate = 0.5}};
        int rounds = 0;
        Step step{comm, [&] {
                      if (rounds++ != 3) { // the round with the infinity
                          whole.step();
                      }
                  }};
        Join guard{participants(ddp, zero, other, step)};
        std::vector<double> scales;
        for (int round = 0; round < (comm.rank() == comm.size() - 1 ? 6 : 1); ++round) {
            scales.push_back(scaler.scale);
            ddp.forward([] {});
            ddp.backward([&](auto ready) {
                backward(params, {}, comm.rank(), round, [](std::size_t) {});
                for (std::size_t i = params.size(); i-- > 0;) {
                    Numbers numbers = read(params[i].grad);
                    for (double& number : numbers) {
                        number *= scaler.scale;
                    }
                    if (round == 3 && i == 2) {
                        numbers[0] = std::numeric_limits<double>::infinity();
                    }
                    write(params[i].grad, numbers);
                    ready(i);
                }
            });
            other.forward([] {});
            other.backward([&](auto ready) { backward(expected, {}, comm.rank(), round, ready); });
            zero.step();
            step.step();
        }
        guard.finish();
        // As GradScaler: two steps, then twice the scale; half of it where a step was skipped.
        CHECK(scaler.scale == 16.0);
        CHECK(scaler.steps == 0);
        if (comm.rank() == comm.size() - 1) {
            CHECK(scales == std::vector<double>{8, 8, 16, 16, 8, 8});
        }
        CHECK(values_of(params) == values_of(expected));
    });
}

TEST_CASE("LossScaler refuses gradients of f16 on all ranks, those that own none of them, too") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        joinable::LossScaler scaler;
        std::vector<StridedParam> params = make({});
        std::vector<StridedParam> halves = make({.dtype = DType::f16});
        halves.erase(halves.begin() + 1, halves.end()); // of one owner
        ZeroRedundancyOptimizer zero{
            comm, params, Sgd{}, {.before_step = std::ref(scaler), .shared = {scaler}}
        };
        zero.add_parameter_group(halves, Sgd{});
        backward(params, {}, comm.rank(), 0, [](std::size_t) {});
        write(halves[0].grad, Numbers(halves[0].grad.numel(), 0.5));
        auto const before = values_of(params);
        std::string const why =
            "LossScaler: gradients of f16 would be rounded to f16 after the division, so those that the scale has "
            "kept would become 0; train values of f32, or of bf16, which need no scale";
        CHECK_THROWS_WITH_AS(zero.step(), why.c_str(), ContractViolation);
        CHECK(values_of(params) == before);
        CHECK(scaler.scale == 65536);
        CHECK(scaler.steps == 0);
    });
}

TEST_CASE("a LossScaler whose members make no sense is refused in a sentence, and stays as it is") {
    using joinable::LossScaler;
    for (LossScaler scaler :
         {LossScaler{.scale = 0},
          LossScaler{.scale = std::numeric_limits<double>::infinity()},
          LossScaler{.growth = 0.5},
          LossScaler{.backoff = 1},
          LossScaler{.backoff = 0},
          LossScaler{.interval = 0}}) {
        double const scale = scaler.scale;
        CHECK_THROWS_WITH_AS(
            scaler.update(false), doctest::Contains("LossScaler: "), ContractViolation
        );
        CHECK(scaler.scale == scale);
    }
    LossScaler largest{.scale = 1e308, .interval = 1};
    CHECK(largest.update(true));
    CHECK(largest.scale == 1e308); // and not infinite
}

TEST_CASE("a copy of a shared object refers to what it was made of") {
    LossScale loss;
    joinable::SharedObject object{loss};
    joinable::SharedObject const copy = object;
    ZeroOptions const options{.shared = {object}};
    CHECK(copy.data() == &loss);
    CHECK(options.shared[0].data() == &loss);
    CHECK(options.shared[0].bytes() == sizeof(LossScale));
}

TEST_CASE("an array of numbers is a shared object") {
    over_ranks({1, 2}, [](RankCommunicator& comm) {
        double scales[2]{8.0, 4.0};
        std::vector<StridedParam> params = make({});
        DistributedDataParallel ddp{comm, params};
        ZeroRedundancyOptimizer zero{
            comm,
            params,
            Sgd{},
            {.before_step = [](auto const&) { return true; }, .shared = {scales}}
        };
        Join guard{participants(ddp, zero)};
        for (int round = 0; round <= comm.rank(); ++round) { // the last rank goes on alone
            ddp.forward([] {});
            ddp.backward([&](auto ready) { backward(params, {}, comm.rank(), round, ready); });
            scales[1] += comm.rank();
            zero.step();
        }
        guard.finish();
        CHECK(scales[0] == 8.0);
        CHECK(scales[1] == (comm.size() == 1 ? 4.0 : 6.0));
    });
}

TEST_CASE("groups have settings of their own, and share the load of ranks") {
    over_ranks({1, 2, 3, 4}, [](RankCommunicator& comm) {
        for (ZeroOptions const& options : all_options) {
            std::vector<StridedParam> params = make({});
            std::vector<StridedParam> more = make({.dtype = DType::f64});
            std::vector<StridedParam> expected = make({});
            std::vector<StridedParam> more_expected = make({.dtype = DType::f64});
            Adam const slow{.learning_rate = 0.01};
            Adam const fast{.learning_rate = 0.1, .weight_decay = 0.5, .amsgrad = true};
            ZeroRedundancyOptimizer zero{comm, params, slow, options};
            zero.add_parameter_group(more, fast);
            WholeOptimizer whole{expected, slow};
            WholeOptimizer more_whole{more_expected, fast};
            for (int round = 0; round < 3; ++round) {
                for (auto* model : {&params, &more, &expected, &more_expected}) {
                    backward(*model, {}, 1, round, [](std::size_t) {});
                }
                zero.rule(1).learning_rate = more_whole.rule.learning_rate = 0.1 + 0.1 * round;
                zero.step();
                whole.step();
                more_whole.step();
            }
            CHECK(values_of(params) == values_of(expected));
            CHECK(values_of(more) == values_of(more_expected));
        }
    });
}

// test_sharding: each rank owns sum(sizes) elements.
TEST_CASE("parameters are dealt out largest first, to the rank with the least") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        std::vector<std::size_t> sizes;
        for (int rank = 0; rank < comm.size(); ++rank) {
            sizes.insert(sizes.end(), {9, 7, 5, 3});
        }
        std::vector<Param<float>> params = make_params<float>(sizes);
        ZeroRedundancyOptimizer zero{comm, params, Sgd{.learning_rate = 0.01, .momentum = 0.9}};
        std::vector<std::size_t> loads(static_cast<std::size_t>(comm.size()));
        for (std::size_t i = 0; i < sizes.size(); ++i) {
            loads[static_cast<std::size_t>(zero.owner_of(i))] += sizes[i];
        }
        CHECK(loads == std::vector<std::size_t>(loads.size(), 24));
        CHECK(zero.state_bytes() == 24 * sizeof(float));
    });
    over_ranks({2}, [](RankCommunicator& comm) {
        // Sorted: 9 to rank 0, 7 to rank 1, 5 (first) to rank 1, 5 (second) to rank 0, 3 to rank 1.
        std::vector<Param<float>> params = make_params<float>({5, 9, 3, 5, 7});
        ZeroRedundancyOptimizer zero{comm, params, Sgd{}};
        int const owners[] = {1, 0, 1, 0, 1};
        for (std::size_t i = 0; i < 5; ++i) {
            CHECK(zero.owner_of(i) == owners[i]);
        }
        std::vector<Param<float>> more = make_params<float>({1, 2}); // loads are 14 and 15
        zero.add_parameter_group(more, Sgd{});
        CHECK(zero.owner_of(6) == 0); // the larger one first
        CHECK(zero.owner_of(5) == 1);
        CHECK(
            zero.table() == "rank    elements  bytes of state\n"
                            "   0          16               0\n"
                            "   1          16               0\n"
        );
        CHECK_THROWS_WITH_AS(
            static_cast<void>(zero.owner_of(7)),
            "parameter 7 has no owner: it needs no gradient, or there is none of this index",
            ContractViolation
        );
        std::vector<Param<float>> first = make_params<float>({9, 3});
        std::vector<Param<float>> second = make_params<float>({4, 1});
        ZeroRedundancyOptimizer groups{comm, first, Sgd{}};
        groups.add_parameter_group(second, Sgd{});
        CHECK(groups.owner_of(2) == 1); // which has 3 so far, and then 7
        CHECK(groups.owner_of(3) == 1);
        std::vector<Param<float>> chosen = make_params<float>({1, 2, 3});
        ZeroRedundancyOptimizer by_hand{comm, chosen, Sgd{}, {.owners = {1, 1, 0}}};
        CHECK(by_hand.owner_of(0) == 1);
        CHECK(by_hand.owner_of(2) == 0);
        std::vector<Param<float>> later = make_params<float>({2, 1});
        by_hand.add_parameter_group(later, Sgd{}); // loads are 3 and 3
        CHECK(by_hand.owner_of(3) == 0);
        std::vector<Param<float>> much = make_params<float>({9});
        std::vector<Param<float>> little = make_params<float>({4, 5});
        ZeroRedundancyOptimizer all_here{comm, much, Sgd{}, {.owners = {0}}};
        all_here.add_parameter_group(little, Sgd{});
        CHECK(all_here.owner_of(1) == 1);
        CHECK(all_here.owner_of(2) == 1);
    });
}

TEST_CASE("the settings of a group stay where they are when groups are added and states loaded") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        std::vector<std::vector<Param<float>>> models;
        for (int k = 0; k < 20; ++k) {
            models.push_back(make_params<float>({2}, 1.0F));
        }
        ZeroRedundancyOptimizer zero{comm, models[0], Sgd{.learning_rate = 0.5}};
        Sgd& first = zero.rule();
        for (int k = 1; k < 20; ++k) {
            zero.add_parameter_group(models[static_cast<std::size_t>(k)], Sgd{});
        }
        zero.consolidate();
        zero.load(comm.rank() == 0 ? zero.state() : joinable::OptimizerState<Sgd>{});
        CHECK(&first == &zero.rule());
        first.learning_rate = 0.25;
        add_gradient(models[0][0], 1.0);
        zero.step();
        CHECK(models[0][0].value[0] == 0.75F);
    });
}

TEST_CASE("a gathered state is loaded where it is") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        for (int const root : {0, comm.size() - 1}) {
            std::vector<Param<float>> x = make_params<float>({300, 2}, 1.0F);
            Sgd const rule{.learning_rate = 0.1, .momentum = 0.5};
            ZeroRedundancyOptimizer zero{comm, x, rule};
            auto const step = [&] {
                for (Param<float>& param : x) {
                    add_gradient(param, 1.0);
                }
                zero.step();
            };
            step();
            zero.consolidate(root);
            joinable::OptimizerState<Sgd> const none;
            zero.load(comm.rank() == root ? zero.state() : none, root); // a reference, no copy
            step();
            CHECK(x[0].value[299] == doctest::Approx(0.65)); // momentum 2.5 = 0.5 * 1 + 2
        }
    });
}

/// A rule with as many numbers for each element as it is told.
struct Counted {
    std::size_t count;

    [[nodiscard]] std::span<std::string_view const> state_names() const {
        static constexpr std::string_view names[] = {"a", "b", "c", "d", "e", "f", "g", "h", "i"};
        return std::span{names}.first(count);
    }
    template <class T>
    void update(joinable::UpdateRange<T> const& range) const {
        for (std::size_t i = 0; i < range.size; ++i) {
            for (T* const state : range.state) {
                state[i] += range.gradients[i];
            }
            range.values[i] -= range.state.back()[i];
        }
    }
};

TEST_CASE("a rule keeps at most eight numbers for each element") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        std::vector<Param<float>> x = make_params<float>({3}, 1.0F);
        ZeroRedundancyOptimizer zero{comm, x, Counted{8}};
        add_gradient(x[0], 1.0);
        zero.step();
        CHECK(x[0].value[0] == 0.0F);
        CHECK_THROWS_WITH_AS(
            (ZeroRedundancyOptimizer{comm, x, Counted{9}}),
            "a rule keeps at most 8 numbers for each element, but its state_names() are 9; keep fewer, or "
            "step by a LocalOptimizer, which keeps its state itself",
            ContractViolation
        );
    });
}

TEST_CASE("settings and counts that are not those of all groups and parameters are refused") {
    joinable::SelfCommunicator comm;
    std::vector<Param<float>> x = make_params<float>({1, 1});
    ZeroRedundancyOptimizer zero{comm, x, Sgd{.learning_rate = 0.5}};
    std::vector<std::uint64_t> const counts{1, 2, 3};
    std::span const some{counts};
    CHECK_THROWS_WITH_AS(
        zero.resume({}, some.first(2)),
        "resume() takes a rule for each of 1 groups and a step count for each of 2 parameters, but was "
        "given 0 rules and 2 counts",
        ContractViolation
    );
    CHECK_THROWS_AS(zero.resume({Sgd{}, Sgd{}}, some.first(2)), ContractViolation);
    CHECK_THROWS_AS(zero.resume({Sgd{}}, some), ContractViolation);
    CHECK_THROWS_AS(zero.resume({Sgd{}}, some.first(1)), ContractViolation);
    CHECK(zero.rule().learning_rate == 0.5);
    zero.resume({Sgd{.learning_rate = 0.25}}, some.first(2));
    CHECK(zero.rule().learning_rate == 0.25);
}

TEST_CASE("a flat partition gives every rank as much, but for a cache line of each bucket") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        std::vector<Param<float>> params = make_params<float>({1000, 1, 37, 5000});
        ZeroRedundancyOptimizer zero{comm, params, Adam{}, {.partition = Partition::flat}};
        auto const world = static_cast<std::size_t>(comm.size());
        std::size_t const fair = (6038 + world - 1) / world;
        CHECK(zero.state_bytes() >= fair * 8);
        CHECK(zero.state_bytes() < (fair + 16) * 8);
        CHECK_THROWS_AS(static_cast<void>(zero.owner_of(0)), ContractViolation);
    });
}

TEST_CASE("state moves to the other partition, in the middle of a training") {
    over_ranks({1, 2, 3, 4}, [](RankCommunicator& comm) {
        std::size_t turn = 0;
        for (DType const dtype : {DType::f32, DType::f64, DType::bf16}) {
            for (ZeroOptions const& options : all_options) {
                if (is_left_out(turn++, 3, comm.size())) {
                    continue;
                }
                Adam const rule{.learning_rate = 0.05, .amsgrad = true};
                Model const model{.dtype = dtype, .has_strides = true};
                std::vector<StridedParam> expected = make(model);
                WholeOptimizer whole{expected, rule};
                std::vector<StridedParam> params = make(model);
                ZeroRedundancyOptimizer before{comm, params, rule, options};
                auto const step = [&](auto& optimizer, int round) {
                    backward(params, model, 0, round, [](std::size_t) {});
                    backward(expected, model, 0, round, [](std::size_t) {});
                    optimizer.step();
                    whole.step();
                };
                step(before, 0);
                step(before, 1);
                int const root = comm.size() - 1;
                before.consolidate(root);
                joinable::OptimizerState<Adam> state;
                if (comm.rank() == root) {
                    state = before.state();
                } else {
                    CHECK_THROWS_AS(static_cast<void>(before.state()), ContractViolation);
                }
                for (ZeroOptions const& other : all_options) {
                    if (other.partition != options.partition) {
                        ZeroRedundancyOptimizer after{comm, params, Adam{}, other};
                        after.load(state, root);
                        CHECK(after.rule().learning_rate == 0.05);
                        CHECK(after.rule().amsgrad);
                        step(after, 2);
                        CHECK(values_of(params) == values_of(expected));
                        after.consolidate(root);
                        if (comm.rank() == root) {
                            state = after.state();
                        }
                    }
                }
            }
        }
    });
}

// The oracle: one rank in double, which averages over as many ranks as there are.
TEST_CASE(
    "state moves from any number of ranks to any other, between uneven guards" *
    doctest::skip(!ranks_share_memory)
) {
    Model const model{.dtype = DType::f64, .has_strides = true, .frozen = 2};
    AdamW const rule{.learning_rate = 0.05, .weight_decay = 0.1, .amsgrad = true};
    std::size_t turn = 0;
    for (int const from : {1, 2, 3, 4, 8}) {
        for (int const to : {1, 2, 3, 4, 8}) {
            if (is_left_out(turn++, 9, 7)) { // 2 to 3, and 4 to 2 run
                continue;
            }
            CAPTURE(from);
            CAPTURE(to);
            std::vector<StridedParam> params = make(model);
            WholeOptimizer serial{params, rule};
            auto const inputs = [](int epoch, int rank) {
                return epoch == 0 ? 1 + rank % 3 : 3 - rank % 4;
            };
            joinable::OptimizerState<AdamW> state;
            std::vector<Numbers> values;
            for (int const epoch : {0, 1}) {
                int const world = epoch == 0 ? from : to;
                over_ranks({world}, [&](RankCommunicator& comm) {
                    std::vector<StridedParam> own = make(model);
                    for (std::size_t i = 0; i < values.size() && comm.rank() == 0; ++i) {
                        write(own[i].value.view(), values[i]);
                    }
                    DistributedDataParallel ddp{comm, own}; // all begin as rank 0
                    ZeroOptions const& options =
                        all_options[(turn + static_cast<std::size_t>(epoch)) % 4];
                    ZeroRedundancyOptimizer zero{comm, own, epoch == 0 ? rule : AdamW{}, options};
                    int const root = comm.size() - 1;
                    if (epoch == 1) {
                        zero.load(
                            comm.rank() == root ? state : joinable::OptimizerState<AdamW>{}, root
                        );
                    }
                    {
                        Join guard{participants(ddp, zero)};
                        for (int round = 0; round < inputs(epoch, comm.rank()); ++round) {
                            ddp.forward([] {});
                            ddp.backward([&](auto ready) {
                                backward(own, model, comm.rank(), 9 * epoch + round, ready);
                            });
                            zero.step();
                        }
                        guard.finish();
                    }
                    zero.consolidate(root);
                    comm.barrier();
                    if (comm.rank() == root) {
                        state = zero.state();
                        values = values_of(own);
                    }
                });
                for (int round = 0; round < 3; ++round) {
                    for (std::size_t i = 0; i < params.size(); ++i) {
                        params[i].need_grad();
                        Numbers average(params[i].grad.numel());
                        for (int rank = 0; rank < world; ++rank) {
                            for (std::size_t k = 0;
                                 k < average.size() && round < inputs(epoch, rank);
                                 ++k) {
                                average[k] += gradient_of(rank, 9 * epoch + round, i, k) / world;
                            }
                        }
                        write(params[i].grad, average);
                    }
                    if (round < (epoch == 0 ? std::min(world, 3) : 3)) {
                        serial.step();
                    }
                }
            }
            auto const expected = values_of(params);
            for (std::size_t i = 0; i < expected.size(); ++i) {
                for (std::size_t k = 0; k < expected[i].size(); ++k) {
                    CHECK(std::abs(values[i][k] - expected[i][k]) < 1e-12);
                }
            }
        }
    }
}

// test_state_dict, with its numbers.
TEST_CASE("state is gathered whole, by name, and settings are loaded with it") {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        std::vector<Param<float>> x = make_params<float>({1, 1}, 1.0F);
        ZeroRedundancyOptimizer zero{comm, x, Sgd{.learning_rate = 0.1, .momentum = 0.9}};
        add_gradient(x[0], 1.0);
        add_gradient(x[1], 1.0);
        zero.step();
        CHECK(x[1].value[0] == doctest::Approx(0.9));
        zero.consolidate();
        joinable::OptimizerState<Sgd> state;
        if (comm.rank() == 0) {
            state = zero.state();
            CHECK(state.rules.size() == 1);
            CHECK(state.rules[0].learning_rate == 0.1);
            CHECK(state.parameters.size() == 2);
            CHECK(state.parameters[1].steps == 1);
            auto const& tensor = state.parameters[1].tensors.at(0);
            CHECK(tensor.name == "momentum_buffer");
            CHECK(tensor.extents == Shape{1});
            float buffer = 0;
            std::memcpy(&buffer, tensor.elements.data(), sizeof(buffer));
            CHECK(buffer == 1.0F);
        }
        ZeroRedundancyOptimizer again{comm, x, Sgd{.learning_rate = 0.01}};
        again.load(state);
        CHECK(again.rule().learning_rate == 0.1);
        again.step();
        CHECK(x[0].value[0] == doctest::Approx(0.71));
        CHECK(x[1].value[0] == doctest::Approx(0.71));
    });
}

TEST_CASE("a state of another model is refused on all ranks, and nothing changes") {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        std::vector<Param<float>> params = make_params<float>({3, 2});
        ZeroRedundancyOptimizer zero{comm, params, Adam{}};
        std::vector<Param<float>> others = make_params<float>({3, 4});
        ZeroRedundancyOptimizer other{comm, others, Adam{}};
        other.consolidate();
        auto const text_of = [&](auto const& change) {
            joinable::OptimizerState<Adam> state;
            if (comm.rank() == 0) {
                state = other.state();
            }
            change(state);
            try {
                zero.load(state);
            } catch (ContractViolation const& error) {
                CHECK(comm.rank() == 0);
                return std::string{error.what()};
            } catch (joinable::PeerFailed const& error) {
                CHECK(error.rank() == 0);
                return std::string{};
            }
            return std::string{"loaded"};
        };
        CHECK(
            text_of([](auto&) {}) ==
            (comm.rank() == 0
                 ? "the state of parameter 1 has exp_avg f32 (4) of 16 bytes, where the "
                   "model needs exp_avg f32 (2)"
                 : "")
        );
        CHECK(
            text_of([](auto& state) { state.parameters.resize(1); }) ==
            (comm.rank() == 0
                 ? "the state is of 1 groups of 1 parameters, but the optimizer has 1 of 2"
                 : "")
        );
    });
}

TEST_CASE("values of 16 bits that the engine changed are found, and become masters by reload()") {
    over_ranks({1, 2}, [](RankCommunicator& comm) {
        std::vector<StridedParam> params = make({.dtype = DType::bf16});
        ZeroRedundancyOptimizer zero{comm, params, Sgd{.learning_rate = 1.0}};
        backward(params, {}, 0, 0, [](std::size_t) {});
        zero.step();
        auto const set = [&](double number) {
            for (StridedParam& param : params) {
                write(param.value.view(), Numbers(param.value.view().numel(), number));
            }
        };
        set(2.0);
        CHECK_THROWS_WITH_AS(
            zero.step(),
            doctest::Contains(
                "has changed since the last step, but the optimizer steps a copy of 32 bits; "
                "call reload() on every rank when values were loaded"
            ),
            ContractViolation
        );
        zero.reload();
        write(params[2].grad, {0.5});
        zero.step();
        CHECK(read(params[2].value.view()) == Numbers{1.5});
    });
}

TEST_CASE("parameters begin as rank 0 has them") {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        std::vector<Param<float>> params =
            make_params<float>({3}, 1.0F + static_cast<float>(comm.rank()));
        ZeroRedundancyOptimizer const zero{comm, params, Sgd{}};
        CHECK(params[0].value == std::vector<float>(3, 1.0F));
    });
}

TEST_CASE("a parameter that is sent from where it is may get another layout between steps") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        for (Partition const partition : {Partition::by_parameters, Partition::flat}) {
            // A flat part has large pieces, and small ones before, between and after them.
            std::size_t const columns = joinable::detail::lone_bytes / 4 / 64;
            Shape const large{64 * static_cast<std::size_t>(comm.size()), columns};
            std::vector<StridedParam> params;
            std::vector<Numbers> begun;
            for (Shape const& extents : {Shape{5}, large, Shape{3, 7}, large, Shape{0}, Shape{9}}) {
                Shape const dense = row_major_strides(extents);
                StridedParam& param = params.emplace_back(
                    StridedParam{{{DType::f32, extents, dense}, {DType::f32, extents, dense}, {}}}
                );
                Numbers gradients;
                Numbers& values = begun.emplace_back();
                for (std::size_t k = 0; k < param.value.view().numel(); ++k) {
                    gradients.push_back(static_cast<double>((k * 7 + params.size()) % 31) / 8);
                    values.push_back(static_cast<double>((k * 3 + params.size()) % 29) / 4);
                }
                write(param.value.view(), values);
                param.need_grad();
                write(param.grad, gradients);
            }
            ZeroRedundancyOptimizer zero{
                comm, params, Sgd{.learning_rate = 0.5}, {.partition = partition}
            };
            Shape const dense = row_major_strides(large);
            for (Shape const& strides :
                 {dense, Shape{1, large[0] + 6}, Shape{columns + 9, 1}, dense}) {
                Numbers const values = read(params[1].value.view());
                params[1].value = OwnedTensor{DType::f32, large, strides};
                write(params[1].value.view(), values);
                zero.step();
                CHECK(params[1].value.has_its_gaps());
            }
            for (std::size_t i = 0; i < params.size(); ++i) {
                Numbers const gradients = read(params[i].grad);
                Numbers expected = begun[i];
                for (std::size_t k = 0; k < expected.size(); ++k) {
                    expected[k] -= 4 * 0.5 * gradients[k];
                }
                CHECK(read(params[i].value.view()) == expected);
            }
        }
    });
}

TEST_CASE("a value whose elements come in another order keeps no state of the old one") {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        for (Partition const partition : {Partition::by_parameters, Partition::flat}) {
            Shape const extents{2, 2};
            auto const tensor = [&](Shape const& strides, Numbers const& numbers) {
                OwnedTensor made{DType::f32, extents, strides};
                write(made.view(), numbers);
                return made;
            };
            std::vector<StridedParam> params;
            params.push_back({{tensor({2, 1}, Numbers(4)), tensor({2, 1}, {1.0, 2.0, 4.0, 8.0}), {}}
            });
            params[0].grad = params[0].own.view();
            Sgd const rule{.learning_rate = 1.0, .momentum = 0.5};
            ZeroRedundancyOptimizer zero{comm, params, rule, {.partition = partition}};
            zero.step();
            zero.consolidate();
            auto const state = comm.rank() == 0 ? zero.state() : joinable::OptimizerState<Sgd>{};
            params[0].value = tensor({1, 2}, read(params[0].value.view()));
            std::string const text =
                "parameter 0 is f32 (2, 2) with strides (1, 2) now, but was f32 (2, 2) with strides (2, 1) when it "
                "was given, and the optimizer keeps its elements in that order; give the value that layout on "
                "every rank, or make a new optimizer";
            CHECK_THROWS_WITH_AS(zero.step(), text.c_str(), ContractViolation);
            CHECK_THROWS_WITH_AS(zero.consolidate(), text.c_str(), ContractViolation);
            CHECK_THROWS_WITH_AS(zero.load(state), text.c_str(), ContractViolation);
            params[0].value = tensor({5, 1}, read(params[0].value.view())); // padded rows
            zero.step();
            CHECK(read(params[0].value.view()) == Numbers{-2.5, -5.0, -10.0, -20.0});
        }
    });
}

TEST_CASE("masters are not read from a value whose elements come in another order") {
    over_ranks({1, 2}, [](RankCommunicator& comm) {
        Shape const extents{2, 2};
        std::vector<StridedParam> params;
        params.push_back({{{DType::bf16, extents, {2, 1}}, {DType::bf16, extents, {2, 1}}, {}}});
        params[0].need_grad();
        ZeroRedundancyOptimizer zero{comm, params, Sgd{.learning_rate = 1.0}};
        for (Shape const& strides : {Shape{1, 2}, Shape{2, 1}}) {
            params[0].value = OwnedTensor{DType::bf16, extents, strides};
            write(params[0].value.view(), {1.0, 2.0, 3.0, 4.0});
            if (strides[0] == 1) {
                CHECK_THROWS_AS(zero.reload(), ContractViolation);
            }
        }
        zero.reload();
        zero.step();
        CHECK(read(params[0].value.view()) == Numbers{1.0, 2.0, 3.0, 4.0});
    });
}

TEST_CASE("strides of a dimension of one element may change") {
    over_ranks({1, 2}, [](RankCommunicator& comm) {
        Shape const extents{1, 2};
        std::vector<StridedParam> params;
        params.push_back({{{DType::f32, extents, {2, 1}}, {DType::f32, extents, {2, 1}}, {}}});
        params[0].need_grad();
        write(params[0].value.view(), {1.0, 2.0});
        write(params[0].grad, {1.0, 1.0});
        ZeroRedundancyOptimizer zero{comm, params, Sgd{.learning_rate = 0.5}};
        params[0].value = OwnedTensor{DType::f32, extents, {7, 1}};
        write(params[0].value.view(), {3.0, 4.0});
        zero.step();
        CHECK(read(params[0].value.view()) == Numbers{2.5, 3.5});
    });
}

TEST_CASE("where consolidate() is refused, what it gathered before is still there") {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        std::vector<StridedParam> params = make({});
        ZeroRedundancyOptimizer zero{comm, params, Adam{}};
        zero.consolidate();
        auto const is_there = [&] {
            return comm.rank() != 0 || zero.state().parameters.size() == params.size();
        };
        CHECK_THROWS_AS(zero.consolidate(99), ContractViolation);
        CHECK(is_there());
        if (comm.size() > 1) {
            zero.rule().learning_rate = comm.rank();
            CHECK_THROWS_AS(zero.consolidate(), Mismatch);
            CHECK(is_there());
            zero.rule().learning_rate = 0.5;
        }
        zero.consolidate();
        CHECK(is_there());
    });
}

TEST_CASE("a gradient is laid out as its value whatever the stride of a dimension of one element") {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        Shape const extents{64, 1};
        std::vector<StridedParam> params;
        params.push_back({{{DType::f32, extents, {1, 1}}, {DType::f32, extents, {1, 64}}, {}}});
        params[0].need_grad();
        write(params[0].grad, Numbers(64, 1.0)); // of norm 8
        ZeroOptions const options{.partition = Partition::flat, .before_step = ClipNorm{4.0}};
        ZeroRedundancyOptimizer zero{comm, params, Sgd{.learning_rate = 1.0}, options};
        zero.step();
        for (double const number : read(params[0].value.view())) {
            CHECK(number == doctest::Approx(-0.5));
        }
    });
}

/// What all ranks throw when each makes an optimizer.
template <class F>
std::string refusal(F const& f) {
    try {
        f();
    } catch (std::exception const& error) {
        return error.what();
    }
    return {};
}

TEST_CASE("what cannot be sharded is refused with its name") {
    over_ranks({1, 2}, [](RankCommunicator& comm) {
        std::vector<Param<float>> none;
        CHECK(
            refusal([&] { ZeroRedundancyOptimizer{comm, none, Sgd{}}; }) ==
            "the list of parameters is empty: there is nothing to step; give the parameters to train, with "
            "requires_grad = true, or run without this optimizer"
        );
        std::vector<Param<int>> integers = make_params<int>({3});
        CHECK(refusal([&] {
                  ZeroRedundancyOptimizer{comm, integers, Sgd{}};
              }) == "parameter 0 is of i32, which no rule steps; give it requires_grad = false");
        std::vector<Param<float>> params = make_params<float>({3, 2});
        CHECK(refusal([&] {
                  ZeroRedundancyOptimizer{comm, params, Adam{.beta1 = 2.0}};
              }) == "Adam::beta1 is 2; give a number from 0 to below 1");
        CHECK(refusal([&] {
                  ZeroRedundancyOptimizer{comm, params, Adam{}, {.owners = {0}}};
              }) == "owners has 1 ranks; give one for each parameter, 2");
        CHECK(
            refusal([&] { ZeroRedundancyOptimizer{comm, params, Adam{}, {.owners = {0, 9}}}; }) ==
            joinable::detail::concat(
                "owners names rank 9, but the ranks are 0 to ", comm.size() - 1
            )
        );
        ZeroRedundancyOptimizer zero{comm, params, Sgd{}};
        CHECK(refusal([&] { zero.add_parameter_group(params, Sgd{}); }
        ).starts_with("of all groups, parameter "));
        CHECK(refusal([&] { static_cast<void>(zero.owner_of(2)); }
        ).starts_with("parameter 2 has no owner"));
        std::string const ranks = joinable::detail::concat(" from 0 to ", comm.size() - 1);
        CHECK(refusal([&] {
                  zero.consolidate(99);
              }) == "expected a to_rank" + ranks + ", but got 99");
        CHECK(refusal([&] {
                  zero.load({}, -1);
              }) == "expected a from_rank" + ranks + ", but got -1");
        zero.rule().momentum = 0.9;
        CHECK(
            refusal([&] { zero.step(); }) ==
            "the rule of a group keeps 1 numbers for each element now, but kept 0 when it was given; leave "
            "settings that add or drop state as they were"
        );
    });
}

TEST_CASE("what one rank cannot shard fails on all ranks") {
    over_ranks({2, 3, 4}, [](RankCommunicator& comm) {
        std::vector<Param<float>> params = make_params<float>({3, 2});
        std::vector<Param<float>*> pointers{&params[0], &params[1]};
        int const culprit = comm.size() - 1;
        if (comm.rank() == culprit) {
            pointers[1] = nullptr;
        }
        std::string text;
        try {
            ZeroRedundancyOptimizer const zero{comm, pointers, Sgd{}};
        } catch (ContractViolation const& error) {
            CHECK(comm.rank() == culprit);
            text = error.what();
        } catch (joinable::PeerFailed const& error) {
            CHECK(error.rank() == culprit);
            text = error.what();
        }
        CHECK(text.find("pointer 1 is null") != std::string::npos);
        ZeroRedundancyOptimizer const zero{comm, params, Sgd{}}; // the communicator is as it was
    });
}

TEST_CASE("rules and options that ranks give differently are named on all of them") {
    over_ranks({2, 3}, [](RankCommunicator& comm) {
        std::vector<Param<float>> params = make_params<float>({3});
        bool const is_last = comm.rank() == comm.size() - 1;
        CHECK(refusal([&] {
                  ZeroRedundancyOptimizer{comm, params, Adam{.learning_rate = is_last ? 0.1 : 0.2}};
              }).find("options differ: learning_rate: rank 0 has 0.2, rank") != std::string::npos);
        CHECK(refusal([&] {
                  ZeroRedundancyOptimizer{comm, params, Adam{.amsgrad = is_last}};
              }).find("options differ: state of the rule") != std::string::npos);
        CHECK(
            refusal([&] {
                auto const partition = is_last ? Partition::flat : Partition::by_parameters;
                ZeroRedundancyOptimizer{comm, params, Adam{}, {.partition = partition}};
            }).find("options differ: partition: rank 0 has by_parameters, rank") !=
            std::string::npos
        );
    });
}

TEST_CASE("what is thrown in a step on one rank is PeerFailed on all others, at every round") {
    for (int const world : groups_of_participants({2, 3, 4})) {
        for (int const culprit : {0, world - 1}) {
            for (int const round_of_failure : {0, 1, 2}) {
                over_ranks({world}, [&](RankCommunicator& comm) {
                    std::vector<Param<float>> params = make_params<float>({3, 4, 5});
                    DistributedDataParallel ddp{comm, params};
                    int round = 0;
                    ZeroRedundancyOptimizer
                        zero{comm, params, Adam{}, {.before_step = [&](ShardGradients const&) {
                                 if (comm.rank() == culprit && round++ == round_of_failure) {
                                     throw std::domain_error{"no memory for the schedule"};
                                 }
                                 return true;
                             }}};
                    std::string text;
                    try {
                        Join guard{participants(ddp, zero)};
                        // Rank 0 runs out first: at the end it fails while it shadows.
                        for (int i = 0; i < (comm.rank() == 0 ? 1 : 4); ++i) {
                            ddp.forward([] {});
                            ddp.backward([&](auto ready) {
                                for (std::size_t k = 3; k-- > 0;) {
                                    add_gradient(params[k], 1.0);
                                    ready(k);
                                }
                            });
                            zero.step();
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
                    CHECK(text.find("no memory for the schedule") != std::string::npos);
                });
            }
        }
    }
}

TEST_CASE(
    "every rank issues the same collectives, joined ranks too, with what each communicator has"
) {
    over_ranks({1, 2, 3, 4}, [](RankCommunicator& inner) {
        for (ZeroOptions const& options : all_options) {
            RecordingCommunicator comm{inner}; // it has the five members of a communicator, no more
            auto const sharded = train_sharded(comm, {}, inputs_of[1], Adam{}, options);
            CHECK(sharded == train_whole(inner, {}, inputs_of[1], Adam{}));
            CHECK(comm.has_trace_of_all());
        }
    });
}

TEST_CASE("in a guard a round that does not sync is not stepped") {
    over_ranks({1, 2}, [](RankCommunicator& comm) {
        std::vector<Param<float>> params = make_params<float>({3});
        DistributedDataParallel ddp{comm, params};
        ZeroRedundancyOptimizer zero{comm, params, Sgd{.learning_rate = 1.0}};
        Join guard{participants(ddp, zero)};
        for (int i = 0; i < 2 * (1 + comm.rank()); ++i) {
            bool const syncs = i % 2 == 1;
            ddp.forward([] {}, {.will_sync = syncs});
            ddp.backward([&](auto ready) {
                add_gradient(params[0], 1.0);
                ready(0);
            });
            if (syncs) {
                zero.step();
                drop_gradients(params);
            }
        }
        guard.finish();
        // 2 from each active rank: all of them, then half.
        CHECK(params[0].value[0] == (comm.size() == 1 ? -2.0F : -3.0F));
    });
}

} // namespace
