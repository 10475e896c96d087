// SPDX-License-Identifier: BSL-1.0
// Models that communicate within their passes, on ranks with different numbers of inputs: equal to one rank
// with the samples of all. And every way to misuse it: a typed error, on all ranks, at once.
#include <joinable/participant/shadowed.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/failure_text.hpp>
#include <support/for_each_type.hpp>
#include <support/gathered_param.hpp>
#include <support/linear_model.hpp>
#include <support/normalized_net.hpp>
#include <support/ranks.hpp>
#include <support/tells_reason.hpp>

#include <joinable/communicator/collectives.hpp>
#include <joinable/communicator/self.hpp>
#include <joinable/communicator/shared_memory/thread.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/participant/action.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/sharded/data_parallel.hpp>
#include <joinable/participant/sharded/options.hpp>
#include <joinable/participant/step.hpp>

namespace {

using namespace joinable_tests;
using joinable::BufferSync;
using joinable::ContractViolation;
using joinable::DataParallelOptions;
using joinable::DistributedDataParallel;
using joinable::Join;
using joinable::Mismatch;
using joinable::participants;
using joinable::PeerFailed;
using joinable::Phase;
using joinable::ReduceOp;
using joinable::Round;
using joinable::RoundNotice;

using Hidden = joinable::ShadowedCommunicator<RankCommunicator>;
static_assert(joinable::Communicator<Hidden>);
static_assert(joinable::Aborts<Hidden> == joinable::Aborts<RankCommunicator>);
static_assert(joinable::HasDeadline<Hidden> == joinable::HasDeadline<RankCommunicator>);

// -- equal to one rank with all samples --------------------------------------------------------------

/// Which rank has no input at all, and how rounds are opened.
enum class Without { nobody, first, last };
enum class Opens { passes, iterate, look_ahead };

std::size_t inputs_of(int rank, int world, Without without) {
    if (world > 1 && ((without == Without::first && rank == 0) ||
                      (without == Without::last && rank == world - 1))) {
        return 0;
    }
    return 3 + static_cast<std::size_t>(5 * rank % 7);
}
std::size_t rounds_of(int world, Without without) {
    std::size_t most = 0;
    for (int rank = 0; rank < world; ++rank) {
        most = std::max(most, inputs_of(rank, world, without));
    }
    return most;
}
std::vector<NormalizedNet::Row> batch_of(int rank, std::size_t input) {
    std::vector<NormalizedNet::Row> samples(1 + (static_cast<std::size_t>(rank) + 2 * input) % 3);
    double phase = 1.7 * rank + 0.9 * static_cast<double>(input);
    for (auto& sample : samples) {
        for (double& x : sample) {
            x = std::sin(phase += 2.3);
        }
    }
    return samples;
}
/// Rounds of all kinds, in turns.
RoundNotice notice_of(std::size_t round, std::uint64_t samples) {
    return {
        .will_sync = round % 4 != 1,
        .phase = round % 4 == 2 ? Phase::evaluate : Phase::train,
        .weight = samples
    };
}
std::size_t uses_in(std::size_t round) {
    return round % 3 == 2 ? 2 : 1;
}
constexpr double rate = 0.05;

struct Trained {
    std::vector<double> values;
    std::vector<double> losses; ///< of all ranks, by round; where this rank is active
    std::vector<double> largest;
};

std::vector<double> values_of(NormalizedNet const& net) {
    std::vector<double> values;
    for (auto const& param : net.params) {
        values.insert(values.end(), param.value.begin(), param.value.end());
    }
    values.insert(values.end(), net.running_mean.begin(), net.running_mean.end());
    values.insert(values.end(), net.running_variance.begin(), net.running_variance.end());
    return values;
}

Trained train_serially(int world, Without without) {
    Trained trained;
    NormalizedNet net{[](auto) {}};
    double weight = 0;
    for (std::size_t round = 0; round < rounds_of(world, without); ++round) {
        std::vector<NormalizedNet::Row> samples;
        for (int rank = 0; rank < world; ++rank) {
            if (round < inputs_of(rank, world, without)) {
                auto const batch = batch_of(rank, round);
                samples.insert(samples.end(), batch.begin(), batch.end());
            }
        }
        RoundNotice const notice = notice_of(round, samples.size());
        net.updates_running = notice.phase == Phase::train;
        trained.losses.push_back(net.forward(samples, uses_in(round)));
        if (notice.phase != Phase::train) {
            continue;
        }
        net.backward([](std::size_t) {});
        weight += static_cast<double>(samples.size());
        if (notice.will_sync) {
            net.step(rate / std::exchange(weight, 0.0));
        }
    }
    trained.values = values_of(net);
    return trained;
}

/// `step()` steps what the passes of `model` have averaged.
template <class Model, class Guard, class Step>
Trained train_in(
    Guard& guard,
    Hidden& hidden,
    NormalizedNet& net,
    Model& model,
    Step const& step,
    Without without,
    Opens opens
) {
    Trained trained;
    auto& comm = model.join_communicator();
    std::vector<std::size_t> rounds(
        inputs_of(static_cast<int>(comm.rank()), static_cast<int>(comm.size()), without)
    );
    for (std::size_t i = 0; i < rounds.size(); ++i) {
        rounds[i] = i;
    }
    auto const announce = [&](std::size_t round) {
        return notice_of(round, batch_of(static_cast<int>(comm.rank()), round).size());
    };
    auto const run = [&](std::size_t round) {
        RoundNotice const notice = announce(round);
        net.updates_running = notice.phase == Phase::train;
        double loss = 0;
        auto const pass = [&] {
            loss = net.forward(batch_of(static_cast<int>(comm.rank()), round), uses_in(round));
            if (notice.phase != Phase::train) { // a metric
                joinable::all_reduce(hidden, std::span{&loss, 1}).wait();
            }
        };
        model.forward(pass, opens == Opens::passes ? notice : RoundNotice{});
        if (notice.phase == Phase::train) {
            joinable::all_reduce(hidden, std::span{&loss, 1}).wait(); // between the passes
            model.backward([&](auto ready) { net.backward(ready); });
        }
        trained.losses.push_back(loss);
        if (notice.will_sync && notice.phase == Phase::train) {
            step();
        }
    };
    if (opens == Opens::passes) {
        for (std::size_t const round : rounds) {
            run(round);
        }
    } else if (opens == Opens::iterate) {
        for (std::size_t const round : guard.iterate(rounds, announce)) {
            run(round);
        }
    } else {
        for (std::size_t const round : guard.iterate(joinable::look_ahead, rounds, announce)) {
            run(round);
        }
    }
    guard.finish();
    trained.values = values_of(net);
    return trained;
}

Trained
train(RankCommunicator& comm, Without without, Opens opens, DataParallelOptions const& options) {
    auto hidden = joinable::shadowed(comm);
    NormalizedNet net{[&](std::span<double> sums) { joinable::all_reduce(hidden, sums).wait(); }};
    DistributedDataParallel ddp{
        comm, net.params, joinable::buffers(net.running_mean, net.running_variance), options
    };
    ddp.attach_collectives(hidden);
    joinable::Step step{comm, [&] { net.step(rate); }};
    Join guard{participants(ddp, step)};
    return train_in(guard, hidden, net, ddp, [&] { step.step(); }, without, opens);
}

Trained train_sharded(
    RankCommunicator& comm, Without without, Opens opens, joinable::ShardedOptions const& options
) {
    auto hidden = joinable::shadowed(comm);
    NormalizedNet net{[&](std::span<double> sums) { joinable::all_reduce(hidden, sums).wait(); }};
    joinable::ShardedDataParallel sharded{
        comm,
        net.params,
        joinable::buffers(net.running_mean, net.running_variance),
        joinable::Sgd{.learning_rate = rate},
        options
    };
    sharded.attach_collectives(hidden);
    Join guard{participants(sharded)};
    auto const step = [&] {
        sharded.step();
        net.step(0); // zeros gradients
    };
    return train_in(guard, hidden, net, sharded, step, without, opens);
}

void check_near(std::vector<double> const& values, std::vector<double> const& expected) {
    for (std::size_t i = 0; i < values.size(); ++i) {
        CAPTURE(i);
        CHECK(values[i] == doctest::Approx(expected.at(i)).epsilon(1e-10));
    }
}

TEST_SUITE_BEGIN("[split]");

TEST_CASE(
    "a net that normalises over all ranks trains on uneven inputs as one rank with all samples" *
    doctest::test_suite("[long]")
) {
    for (Without const without : {Without::nobody, Without::first, Without::last}) {
        for (Opens const opens : {Opens::passes, Opens::iterate, Opens::look_ahead}) {
            for (BufferSync const sync : {BufferSync::after_forward, BufferSync::before_forward}) {
                over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
                    CAPTURE(static_cast<int>(without));
                    CAPTURE(static_cast<int>(opens));
                    CAPTURE(static_cast<int>(sync));
                    auto const world = static_cast<int>(comm.size());
                    CAPTURE(world);
                    Trained const expected = train_serially(world, without);
                    DataParallelOptions options;
                    options.gradient_kind = joinable::GradientKind::sum;
                    options.buffer_sync = sync;
                    options.first_bucket_bytes = 1;
                    options.bucket_cap_bytes = 1;
                    Trained const trained = train(comm, without, opens, options);
                    check_near(trained.values, expected.values);
                    check_near(trained.losses, expected.losses);
                });
            }
        }
    }
}

TEST_CASE(
    "such a net trains the same with a sharded optimizer, and with gradients that are sharded" *
    doctest::test_suite("[long]")
) {
    struct Stage {
        joinable::Sharding sharding;
        bool steps_in_backward;
    };
    for (Stage const stage :
         {Stage{joinable::Sharding::none, false},
          Stage{joinable::Sharding::optimizer, false},
          Stage{joinable::Sharding::gradients, false},
          Stage{joinable::Sharding::gradients, true}}) {
        for (BufferSync const sync : {BufferSync::after_forward, BufferSync::before_forward}) {
            over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
                CAPTURE(name_of(stage.sharding));
                CAPTURE(stage.steps_in_backward);
                CAPTURE(static_cast<int>(sync));
                auto const world = static_cast<int>(comm.size());
                CAPTURE(world);
                joinable::ShardedOptions options;
                options.sharding = stage.sharding;
                options.step_in_backward = stage.steps_in_backward;
                options.gradient_kind = joinable::GradientKind::sum;
                options.buffer_sync = sync;
                options.bucket_cap_bytes = 1;
                for (Without const without : {Without::first, Without::last}) {
                    Trained const expected = train_serially(world, without);
                    Opens const opens = without == Without::first ? Opens::passes : Opens::iterate;
                    Trained const trained = train_sharded(comm, without, opens, options);
                    check_near(trained.values, expected.values);
                    check_near(trained.losses, expected.losses);
                }
            });
        }
    }
}

TEST_CASE("with Sharding::parameters attach_collectives() is refused, because passes gather values"
) {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        auto hidden = joinable::shadowed(comm);
        std::vector<CopyingParam> params;
        params.emplace_back(2);
        joinable::ShardedDataParallel sharded{
            comm,
            params,
            joinable::Sgd{.learning_rate = rate},
            joinable::ShardedOptions{.sharding = joinable::Sharding::parameters}
        };
        CHECK_THROWS_WITH_AS(
            sharded.attach_collectives(hidden),
            doctest::Contains("with Sharding::parameters joined ranks follow only"),
            ContractViolation
        );
    });
}

// -- what joined ranks send --------------------------------------------------------------------------

/// A model without a layer, whose passes run what a test gives them, and the guard around it.
struct Model {
    explicit Model(RankCommunicator& comm, bool attaches = true)
        : hidden{comm}, params{make_params<double>({1})}, ddp{comm, params} {
        if (attaches) {
            ddp.attach_collectives(hidden);
        }
    }
    template <class Pass>
    void round(Pass const& forward, RoundNotice const& notice = {}) {
        round(forward, [] {}, notice);
    }
    template <class Forward, class Backward>
    void round(Forward const& forward, Backward const& backward, RoundNotice const& notice) {
        ddp.forward(forward, notice);
        if (notice.phase == Phase::train) {
            ddp.backward([&](auto ready) {
                backward();
                add_gradient(params[0], 1.0);
                ready(0);
            });
        }
    }
    double sum(double number) {
        joinable::all_reduce(hidden, std::span{&number, 1}).wait();
        return number;
    }

    Hidden hidden;
    std::vector<Param<double>> params;
    DistributedDataParallel<RankCommunicator> ddp;
};

/// Rank 0 never has an input, the last rank has most.
std::size_t uneven(RankCommunicator& comm) {
    return static_cast<std::size_t>(comm.rank());
}

template <class T>
double number_of(T value) {
    if constexpr (std::is_same_v<T, joinable::Half> || std::is_same_v<T, joinable::BFloat16>) {
        return static_cast<float>(value);
    } else {
        return static_cast<double>(value);
    }
}

TEST_CASE("a joined rank changes no result of any operation on any dtype") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        Model model{comm};
        Join guard{participants(model.ddp)};
        for (std::size_t input = 0; input < uneven(comm); ++input) {
            int const first = static_cast<int>(input) + 1; // active rank
            model.round([&] {
                for (std::size_t d = 0; d < joinable::dtype_count; ++d) {
                    auto const dtype = static_cast<joinable::DType>(d);
                    for (std::size_t o = 0; o < joinable::reduce_op_count; ++o) {
                        auto const op = static_cast<ReduceOp>(o);
                        bool const is_of_bits = op == ReduceOp::bit_and || op == ReduceOp::bit_or;
                        if ((is_of_bits && !combines_bits) ||
                            !joinable::detail::is_reducible(dtype, op)) {
                            continue;
                        }
                        joinable_tests::visit_real(dtype, [&]<class T>(std::type_identity<T>) {
                            auto const of = [](int rank) {
                                if constexpr (std::is_integral_v<T>) {
                                    return static_cast<T>(1 + rank % 3);
                                } else {
                                    return T{static_cast<float>(1 + rank % 3)};
                                }
                            };
                            std::array<T, 3> elements{};
                            elements.fill(of(static_cast<int>(comm.rank())));
                            model.hidden.all_reduce({elements.data(), elements.size(), dtype}, op)
                                .wait();
                            double expected = number_of(of(first));
                            for (int rank = first + 1; rank < comm.size(); ++rank) {
                                double const x = number_of(of(rank));
                                auto const bits = static_cast<unsigned>(expected);
                                auto const others = static_cast<unsigned>(x);
                                expected = op == ReduceOp::sum       ? expected + x
                                           : op == ReduceOp::product ? expected * x
                                           : op == ReduceOp::min     ? std::min(expected, x)
                                           : op == ReduceOp::max     ? std::max(expected, x)
                                           : op == ReduceOp::bit_and ? (bits & others)
                                                                     : (bits | others);
                            }
                            for (T const element : elements) {
                                CAPTURE(joinable::name_of(dtype));
                                CAPTURE(joinable::name_of(op));
                                CHECK(number_of(element) == expected);
                            }
                        });
                    }
                }
            });
        }
        guard.finish();
    });
}

TEST_CASE("extremes of negative and of huge numbers are those of active ranks") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        Model model{comm};
        Join guard{participants(model.ddp)};
        for (std::size_t input = 0; input < uneven(comm); ++input) {
            model.round([&] {
                std::array<double, 2> numbers{-5.0, -1e300};
                joinable::all_reduce(model.hidden, numbers, ReduceOp::max).wait();
                CHECK(numbers[0] == -5.0);
                CHECK(numbers[1] == -1e300);
                std::int32_t number = 7;
                model.hidden.all_reduce({&number, 1, joinable::DType::i32}, ReduceOp::min).wait();
                CHECK(number == 7);
            });
        }
        guard.finish();
    });
}

TEST_CASE("a joined rank does not hide a NaN of an active rank from a min or max") {
    if (!combines_bits) {
        return; // NCCL ignores a NaN
    }
    over_ranks({2, 3}, [](RankCommunicator& comm) {
        Model model{comm};
        Join guard{participants(model.ddp)};
        for (std::size_t input = 0; input < uneven(comm); ++input) {
            model.round([&] {
                for (ReduceOp const op : {ReduceOp::min, ReduceOp::max}) {
                    float number = std::numeric_limits<float>::quiet_NaN();
                    model.hidden.all_reduce({&number, 1, joinable::DType::f32}, op).wait();
                    CHECK(std::isnan(number));
                }
            });
        }
        guard.finish();
    });
}

TEST_CASE("broadcasts, barriers, empty collectives and several on their way are followed") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        Model model{comm};
        Join guard{participants(model.ddp)};
        for (std::size_t input = 0; input < uneven(comm); ++input) {
            int const source = static_cast<int>(comm.size()) - 1;
            auto const pass = [&] {
                std::array<double, 3> sent{};
                sent.fill(comm.rank() == source ? 3.5 : 0);
                joinable::broadcast(model.hidden, sent, source).wait();
                CHECK(sent[2] == 3.5);
                model.hidden.barrier();
                model.hidden.all_reduce({nullptr, 0, joinable::DType::f64}, ReduceOp::sum).wait();
                std::vector<double> one(1, 1.0);
                std::vector<double> many(10'000, 2.0);
                auto first = joinable::all_reduce(model.hidden, one);
                auto second = joinable::all_reduce(model.hidden, many);
                second.wait();
                first.wait();
                double const active =
                    model.ddp.join_communicator().size() - 1.0 - static_cast<double>(input);
                CHECK(one[0] == active);
                CHECK(many.back() == 2 * active);
            };
            model.round(pass, pass, {});
        }
        guard.finish();
        CHECK(model.sum(1.0) == comm.size()); // after a guard all ranks run it
    });
}

TEST_CASE("with known lengths, and in a guard that is not enabled, collectives work as well") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        {
            Model model{comm};
            Join guard{participants(model.ddp), {.inputs = uneven(comm)}};
            for (std::size_t input = 0; input < uneven(comm); ++input) {
                double count = 0;
                model.round([&] { count = model.sum(1.0); });
                CHECK(count == comm.size() - 1.0 - static_cast<double>(input));
            }
            guard.finish();
        }
        Model model{comm};
        Join guard{participants(model.ddp), {.enable = false}};
        for (int input = 0; input < 3; ++input) {
            double count = 0;
            model.round([&] { count = model.sum(1.0); });
            CHECK(count == comm.size());
        }
        guard.finish();
    });
}

TEST_CASE("a model's communicator tells why it was aborted") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        auto own = joinable::shadowed(comm);
        check_tells_reason(own);
        CHECK_FALSE(comm.abort_reason());
        comm.barrier();
    });
}

TEST_CASE("two models, each with its own communicator, are followed in one guard") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        Model a{comm};
        Model b{comm};
        Join guard{participants(a.ddp, b.ddp)};
        for (std::size_t input = 0; input < uneven(comm); ++input) {
            double const active = comm.size() - 1.0 - static_cast<double>(input);
            RoundNotice const notice{.will_sync = input % 2 == 0};
            a.round([&] { CHECK(a.sum(1.0) == active); }, notice);
            b.round([&] { CHECK(b.sum(2.0) == 2 * active); }, notice);
        }
        guard.finish();
    });
}

// -- faults ------------------------------------------------------------------------------------------

struct Injected : std::runtime_error {
    using std::runtime_error::runtime_error;
};

enum class Heard { nothing, own, peer_failed, contract, mismatch, timed_out };

/// Runs `body`, and says what it threw. `text` is what that says.
template <class Body>
Heard heard_by(Body const& body, std::string& text) {
    try {
        body();
    } catch (Injected const&) {
        return Heard::own;
    } catch (PeerFailed const& error) {
        text = error.what();
        return Heard::peer_failed;
    } catch (ContractViolation const& error) {
        text = error.what();
        return Heard::contract;
    } catch (Mismatch const& error) {
        text = error.what();
        return Heard::mismatch;
    } catch (joinable::TimedOut const& error) {
        text = error.what();
        return Heard::timed_out;
    }
    return Heard::nothing;
}
TEST_CASE("a throw between two collectives ends all ranks at once, joined ones too") {
    for (bool const in_backward : {false, true}) {
        for (std::size_t const round : {std::size_t{0}, std::size_t{1}}) { // all active; one joined
            over_ranks({2, 3, 4, 8}, [&](RankCommunicator& comm) {
                int const last = static_cast<int>(comm.size()) - 1;
                for (int const culprit : {0, last}) {
                    std::string text;
                    Heard const heard = heard_by(
                        [&] {
                            auto group = comm.split(0, static_cast<int>(comm.rank()));
                            Model model{group};
                            Join guard{participants(model.ddp)};
                            bool const is_short = comm.rank() == (culprit == 0 ? last : 0);
                            for (std::size_t input = 0; input < (is_short ? 1U : 3U); ++input) {
                                auto const pass = [&](bool fails) {
                                    model.sum(1.0);
                                    if (fails && input == round && comm.rank() == culprit) {
                                        throw Injected{"disk on fire"};
                                    }
                                    model.sum(2.0);
                                };
                                model.round(
                                    [&] { pass(!in_backward); }, [&] { pass(in_backward); }, {}
                                );
                            }
                            guard.finish();
                        },
                        text
                    );
                    CAPTURE(in_backward);
                    CAPTURE(round);
                    CAPTURE(culprit);
                    CAPTURE(text);
                    CHECK((heard == (comm.rank() == culprit ? Heard::own : Heard::peer_failed)));
                    if (comm.rank() != culprit) {
                        says(text, "disk on fire");
                        says(text, joinable::detail::concat("rank ", culprit));
                    }
                }
            });
        }
    }
}

TEST_CASE("skip() between two collectives is refused, and all ranks hear of it") {
    for (std::size_t const round : {std::size_t{0}, std::size_t{1}}) {
        over_ranks({2, 3, 4, 8}, [&](RankCommunicator& comm) {
            std::string text;
            bool const is_culprit = comm.rank() == 1;
            Heard const heard = heard_by(
                [&] {
                    auto group = comm.split(0, static_cast<int>(comm.rank()));
                    Model model{group};
                    Join guard{participants(model.ddp)};
                    for (std::size_t input = 0; input < (comm.rank() == 0 ? 1U : 3U); ++input) {
                        try {
                            model.round([&] {
                                model.sum(1.0);
                                if (input == round && is_culprit) {
                                    throw Injected{"bad sample"};
                                }
                                model.sum(1.0);
                            });
                        } catch (Injected const&) {
                            model.ddp.skip();
                        }
                    }
                    guard.finish();
                },
                text
            );
            CAPTURE(round);
            CAPTURE(text);
            CHECK((heard == (is_culprit ? Heard::contract : Heard::peer_failed)));
            says(text, is_culprit ? "skip() cannot follow the collectives" : "bad sample");
        });
    }
}

TEST_CASE("skip() in place of a pass is refused, and all ranks hear of it") {
    for (std::size_t const round : {std::size_t{0}, std::size_t{1}}) {
        over_ranks({2, 3, 4, 8}, [&](RankCommunicator& comm) {
            std::string text;
            Heard const heard = heard_by(
                [&] {
                    auto group = comm.split(0, static_cast<int>(comm.rank()));
                    Model model{group};
                    Join guard{participants(model.ddp)};
                    for (std::size_t input = 0; input < (comm.rank() == 0 ? 1U : 3U); ++input) {
                        if (input == round && comm.rank() == 1) {
                            model.ddp.skip();
                        }
                        model.round([&] { model.sum(1.0); });
                    }
                    guard.finish();
                },
                text
            );
            CAPTURE(round);
            CAPTURE(text);
            CHECK((heard == (comm.rank() == 1 ? Heard::contract : Heard::peer_failed)));
            says(text, "skip() cannot follow the collectives");
        });
    }
}

TEST_CASE("ranks that issue different collectives throw Mismatch, all of them, with both") {
    struct Case {
        std::function<void(Hidden&, bool is_other)> issue;
        std::string there;
        bool needs_joined_rank; ///< where all are active the communicator waits for its deadline
    };
    std::vector<Case> const cases{
        {[](Hidden& hidden, bool is_other) {
             std::vector<double> numbers(is_other ? 3 : 2);
             joinable::all_reduce(hidden, numbers).wait();
         },
         "all_reduce of 3 f64 with sum",
         false},
        {[](Hidden& hidden, bool is_other) {
             std::vector<double> numbers(2);
             joinable::all_reduce(hidden, numbers, is_other ? ReduceOp::max : ReduceOp::sum).wait();
         },
         "all_reduce of 2 f64 with max",
         false},
        {[](Hidden& hidden, bool is_other) {
             if (!is_other) {
                 hidden.barrier();
             }
         },
         "no more collectives in this pass",
         true},
        {[](Hidden& hidden, bool is_other) {
             if (is_other) {
                 hidden.barrier();
             }
         },
         "barrier",
         true},
    };
    for (Case const& one : cases) {
        for (std::size_t const round : {std::size_t{0}, std::size_t{1}}) {
            if (round == 0 && (one.needs_joined_rank || !compares_collectives)) {
                continue; // the library says nothing before such collectives
            }
            over_ranks({3, 4, 8}, [&](RankCommunicator& comm) {
                std::string text;
                Heard const heard = heard_by(
                    [&] {
                        auto group = comm.split(0, static_cast<int>(comm.rank()));
                        Model model{group};
                        Join guard{participants(model.ddp)};
                        for (std::size_t input = 0; input < (comm.rank() == 0 ? 1U : 3U); ++input) {
                            model.round([&] {
                                model.sum(1.0);
                                one.issue(model.hidden, input == round && comm.rank() == 2);
                            });
                        }
                        guard.finish();
                    },
                    text
                );
                CAPTURE(one.there);
                CAPTURE(round);
                CAPTURE(text);
                CHECK((heard == Heard::mismatch));
                says(text, "rank 2");
                says(text, one.there);
            });
        }
    }
}

/// Its sums are there once they are waited for. It counts those that nobody waits for.
class Late {
public:
    Late(joinable::ThreadCommunicator& comm, int& dropped)
        : comm_{comm.split(0, comm.rank())}, dropped_{dropped} {}

    class Work {
    public:
        Work(joinable::ThreadWork work, int& dropped)
            : work_{std::move(work)}, dropped_{&dropped} {}
        Work(Work&& other) noexcept
            : work_{std::move(other.work_)}, dropped_{std::exchange(other.dropped_, nullptr)} {}
        Work& operator=(Work&&) = delete;
        ~Work() {
            if (dropped_ != nullptr) {
                ++*dropped_;
            }
        }
        void wait() {
            dropped_ = nullptr;
            work_.wait();
        }
        [[nodiscard]] bool test() const { return dropped_ == nullptr; }

    private:
        joinable::ThreadWork work_;
        int* dropped_;
    };
    [[nodiscard]] int rank() const { return comm_.rank(); }
    [[nodiscard]] int size() const { return comm_.size(); }
    Work all_reduce(joinable::Buffer buffer, ReduceOp op) {
        return {comm_.all_reduce(buffer, op), dropped_};
    }
    Work broadcast(joinable::Buffer buffer, int root) {
        return {comm_.broadcast(buffer, root), dropped_};
    }
    void barrier() { comm_.barrier(); }
    Late split(int, int) { return {comm_, dropped_}; }

private:
    joinable::ThreadCommunicator comm_;
    int& dropped_;
};

TEST_CASE("what a joined rank has under way is complete before it says that ranks differ") {
    run_ranks({3, 4, 8}, [](joinable::ThreadCommunicator& comm) {
        int dropped = 0;
        {
            Late late{comm, dropped};
            joinable::ShadowedCommunicator<Late> hidden{late};
            auto params = make_params<double>({1});
            DistributedDataParallel<Late> ddp{late, params};
            ddp.attach_collectives(hidden);
            auto const train = [&] {
                Join guard{participants(ddp)};
                for (int input = 0; input < (comm.rank() == 0 ? 0 : 1); ++input) {
                    ddp.forward([&] {
                        double number = 1;
                        joinable::all_reduce(hidden, std::span{&number, 1}).wait();
                        ReduceOp const op = comm.rank() == 2 ? ReduceOp::max : ReduceOp::sum;
                        joinable::all_reduce(hidden, std::span{&number, 1}, op).wait();
                    });
                }
                guard.finish();
            };
            CHECK_THROWS_AS(train(), Mismatch);
        }
        CHECK(dropped == 0);
    });
}

TEST_CASE("where all ranks are active, one that issues more than the others times out for all") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        std::string text;
        Heard const heard = heard_by(
            [&] {
                auto group = comm.split(0, static_cast<int>(comm.rank()));
                group.set_deadline(std::chrono::milliseconds{300});
                Model model{group};
                Join guard{participants(model.ddp)};
                model.round([&] {
                    if (comm.rank() == 1) {
                        model.sum(1.0);
                    }
                });
                guard.finish();
            },
            text
        );
        CAPTURE(text);
        CHECK((heard == Heard::timed_out));
    });
}

/// What is thrown where all ranks run `body` in a guard, in a group of their own.
template <class Body>
void check_refused(std::initializer_list<int> sizes, std::string const& why, Body const& body) {
    over_ranks(sizes, [&](RankCommunicator& comm) {
        std::string text;
        Heard const heard = heard_by(
            [&] {
                auto group = comm.split(0, static_cast<int>(comm.rank()));
                body(group);
            },
            text
        );
        CAPTURE(why);
        CAPTURE(text);
        CHECK((heard == Heard::contract || heard == Heard::peer_failed));
        says(text, why);
    });
}

TEST_CASE("a communicator that no participant of the guard has is refused, before any rank joins") {
    check_refused({1, 2, 3, 4, 8}, "attached to no participant", [](RankCommunicator& comm) {
        Model model{comm, false};
        Join guard{participants(model.ddp)};
        model.round([&] { model.sum(1.0); });
        guard.finish();
    });
    check_refused({1, 2, 3, 4, 8}, "attached to no participant", [](RankCommunicator& comm) {
        Model model{comm, false};
        Join guard{participants(model.ddp)};
        while (guard.next(true)) { // the part of the participant is open, then
            model.round([&] { model.sum(1.0); });
        }
        guard.finish();
    });
    check_refused({1, 2, 3, 4, 8}, "does not list its participant", [](RankCommunicator& comm) {
        Model model{comm};
        joinable::Action other{comm, [] {}, [] {}};
        Join guard{participants(other)};
        other();
        model.round([&] { model.sum(1.0); }, {.phase = Phase::evaluate});
        guard.finish();
    });
}

TEST_CASE("a collective outside the passes is refused") {
    check_refused({1, 2, 3, 4, 8}, "outside the passes", [](RankCommunicator& comm) {
        Model model{comm};
        Join guard{participants(model.ddp)};
        model.round([&] { model.sum(1.0); });
        model.sum(1.0);
        guard.finish();
    });
    check_refused({1, 2, 3, 4, 8}, "outside the passes", [](RankCommunicator& comm) {
        Model model{comm};
        joinable::Step step{comm, [&] { model.sum(1.0); }};
        Join guard{participants(model.ddp, step)};
        for (std::size_t input = 0; input < 1 + uneven(comm); ++input) {
            model.round([&] { model.sum(1.0); });
            step.step();
        }
        guard.finish();
    });
}

TEST_CASE("nobody else communicates between the passes of a round that accumulates") {
    check_refused({1, 2, 3, 4, 8}, "is held open", [](RankCommunicator& comm) {
        Model model{comm};
        joinable::Action log{comm, [] {}, [] {}};
        Join guard{participants(model.ddp, log)};
        for (std::size_t input = 0; input < 1 + uneven(comm); ++input) {
            model.round([] {}, [&] { log(), model.sum(1.0); }, {.will_sync = false});
        }
        guard.finish();
    });
}

TEST_CASE("a broadcast from a rank that has joined is refused") {
    check_refused({2, 3, 4, 8}, "rank 0 over a shadowed()", [](RankCommunicator& comm) {
        Model model{comm};
        Join guard{participants(model.ddp)};
        for (std::size_t input = 0; input < uneven(comm); ++input) {
            model.round([&] {
                double number = 1;
                joinable::broadcast(model.hidden, std::span{&number, 1}, 0).wait();
            });
        }
        guard.finish();
    });
}

TEST_CASE("passes whose end joined ranks would not hear of are refused") {
    check_refused({1, 2, 3, 4, 8}, "call forward(pass)", [](RankCommunicator& comm) {
        Model model{comm};
        Join guard{participants(model.ddp)};
        model.ddp.prepare_for_forward({.phase = Phase::evaluate});
        guard.finish();
    });
    check_refused({2, 3, 4, 8}, "call forward(pass)", [](RankCommunicator& comm) {
        Model model{comm};
        Join guard{participants(model.ddp)};
        if (comm.rank() == 0) {
            model.ddp.prepare_for_forward({.phase = Phase::evaluate});
        }
        model.round([&] { model.sum(1.0); }, {.phase = Phase::evaluate}); // the others hear why
        guard.finish();
    });
    check_refused({1, 2, 3, 4, 8}, "call backward(), or announce", [](RankCommunicator& comm) {
        Model model{comm};
        Join guard{participants(model.ddp)};
        for (int i = 0; i < 2; ++i) {
            model.ddp.forward([&] { model.sum(1.0); }, {.will_sync = false});
        }
        guard.finish();
    });
}

TEST_CASE("a pass that is ended twice is refused at once, though joined ranks follow no pass then"
) {
    check_refused({2, 3, 4}, "finalize_backward() without", [](RankCommunicator& comm) {
        Model model{comm};
        Join guard{participants(model.ddp)};
        for (std::size_t input = 0; input < uneven(comm); ++input) {
            model.round([&] { model.sum(1.0); });
            model.ddp.finalize_backward();
        }
        guard.finish();
    });
}

TEST_CASE("what attach_collectives() cannot take it refuses, and it is compared on entry") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        auto group = comm.split(0, static_cast<int>(comm.rank()));
        Model model{comm};
        Model other{comm, false};
        Hidden of_group{group};
        CHECK_THROWS_WITH_AS(
            model.ddp.attach_collectives(other.hidden),
            doctest::Contains("one shadowed() communicator"),
            ContractViolation
        );
        CHECK_THROWS_WITH_AS(
            other.ddp.attach_collectives(model.hidden),
            doctest::Contains("one shadowed() communicator"),
            ContractViolation
        );
        CHECK_THROWS_WITH_AS(
            other.ddp.attach_collectives(of_group),
            doctest::Contains("of another communicator"),
            ContractViolation
        );
        {
            Hidden for_a_while{comm};
            other.ddp.attach_collectives(for_a_while);
        }
        other.ddp.attach_collectives(other.hidden); // the one before has been destroyed
        Join guard{participants(model.ddp, other.ddp)};
        CHECK_THROWS_AS(model.ddp.attach_collectives(of_group), ContractViolation);
        guard.finish();
    });
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        std::string text;
        Heard const heard = heard_by(
            [&] {
                Model model{comm, comm.rank() != 1};
                Join guard{participants(model.ddp)};
                guard.finish();
            },
            text
        );
        CAPTURE(text);
        CHECK((heard == Heard::mismatch));
        says(text, "attach_collectives()");
    });
}

TEST_CASE("one rank alone, without anybody to split from, has such a communicator, too") {
    joinable::SelfCommunicator comm;
    auto hidden = joinable::shadowed(comm);
    auto params = make_params<double>({1});
    DistributedDataParallel ddp{comm, params};
    ddp.attach_collectives(hidden);
    Join guard{participants(ddp)};
    for (int i = 0; i < 2; ++i) {
        double number = 3.0;
        ddp.forward([&] { joinable::all_reduce(hidden, std::span{&number, 1}).wait(); });
        ddp.backward([&](auto ready) { ready(0); });
        CHECK(number == 3.0);
    }
    guard.finish();
}

TEST_SUITE_END();

} // namespace
