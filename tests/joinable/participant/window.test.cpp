// SPDX-License-Identifier: BSL-1.0
// What a rank accumulated since the last round that synced lives across guards, and ends where gradients are
// reduced or cleared.
#include <joinable/participant/gradient_participant.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/linear_model.hpp>
#include <support/thrown_by.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/sharded/data_parallel.hpp>
#include <joinable/participant/step.hpp>
#include <joinable/zero.hpp>

namespace {

using namespace joinable_tests;
using joinable::ContractViolation;
using joinable::DistributedDataParallel;
using joinable::GradientKind;
using joinable::Join;
using joinable::JoinedGradients;
using joinable::JoinOptions;
using joinable::Mismatch;
using joinable::participants;
using joinable::Phase;
using joinable::Round;
using joinable::RoundNotice;

using Params = std::vector<Param<double>>;

/// One micro-batch: adds `gradient` to parameter 0's.
template <class Ddp>
void train(Ddp& ddp, Params& params, double gradient, RoundNotice const& notice = {}) {
    ddp.forward([] {}, notice);
    ddp.backward([&](auto ready) {
        params[0].g(0) += gradient;
        ready(0);
    });
}

/// Where an engine clears what an epoch left over.
enum class Clears { never, before_guard, before_forward, before_backward, by_discard };

/// Which of two epochs run in a guard.
struct Epochs {
    std::optional<bool> first; ///< whether the guard is enabled; none: there is no guard
    std::optional<bool> second;
};

TEST_CASE("a window over the end of a guard gives the average of one guard, however it is cleared"
) {
    constexpr Epochs both[] = {{true, true}, {true, {}}, {{}, true}, {false, true}, {true, false}};
    constexpr Clears places[] = {
        Clears::never,
        Clears::before_guard,
        Clears::before_forward,
        Clears::before_backward,
        Clears::by_discard
    };
    over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
        for (Epochs const epochs : both) {
            for (Clears const clears : places) {
                CAPTURE(static_cast<int>(clears));
                Params params = make_params<double>({1});
                DistributedDataParallel ddp{comm, params, {.gradient_kind = GradientKind::sum}};
                std::vector<double> averages;
                int held = 0;
                auto const epoch = [&](std::optional<bool> guarded, bool is_second) {
                    bool const discards = is_second && clears == Clears::by_discard;
                    if (is_second && (clears == Clears::before_guard || discards)) {
                        params[0].g(0) = 0;
                        held = 0;
                    }
                    if (discards) {
                        ddp.discard_window();
                    }
                    std::optional<Join<decltype(ddp)>> guard;
                    if (guarded) {
                        guard.emplace(participants(ddp), JoinOptions{.enable = *guarded});
                    }
                    for (int batch = 0; batch < 3;
                         ++batch) { // of 4 samples, each with a gradient of 1
                        bool const begins = is_second && batch == 0;
                        bool const syncs = batch == 1;
                        if (begins && clears == Clears::before_forward) {
                            params[0].g(0) = 0;
                        }
                        ddp.forward([] {}, {.will_sync = syncs, .weight = 4});
                        if (begins && clears == Clears::before_backward) {
                            params[0].g(0) = 0;
                        }
                        ddp.backward([&](auto ready) {
                            params[0].g(0) += 4;
                            ready(0);
                        });
                        if (syncs) {
                            averages.push_back(params[0].g(0));
                            params[0].g(0) = 0;
                        }
                    }
                    if (guard) {
                        CHECK(guard->finish().unsynced_rounds == 1);
                    }
                };
                epoch(epochs.first, false);
                epoch(epochs.second, true);
                CHECK(averages == std::vector<double>{1, 1});
                CHECK(params[0].g(0) == 4);
            }
        }
    });
}

TEST_CASE(
    "what a rank accumulated in one guard flows into the next one that it enters without inputs"
) {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        for (bool const knows_lengths : {false, true}) {
            for (bool const is_weighted : {false, true}) {
                Params params = make_params<double>({1});
                DistributedDataParallel ddp{comm, params, {.gradient_kind = GradientKind::sum}};
                JoinOptions options{.sync_every = 2};
                if (is_weighted) {
                    options.weight_per_input = 4;
                }
                auto const run = [&](std::size_t inputs, double own) {
                    if (knows_lengths) {
                        options.inputs = inputs;
                    }
                    Join guard{participants(ddp), options};
                    for (std::size_t i = 0; i < inputs; ++i) {
                        train(ddp, params, own);
                    }
                    guard.finish();
                };
                run(1,
                    4.0 * (comm.rank() + 1)); // of another length on each rank it would be the same
                run(comm.rank() == 0 ? 2 : 0, 4.0);
                double const ranks = comm.size();
                double const sum = 4 * ranks * (ranks + 1) / 2 + 2 * 4;
                double const expected = sum / (is_weighted ? 4 * ranks + 2 * 4 : ranks);
                if (comm.rank() == 0) {
                    CHECK(params[0].g(0) == doctest::Approx(expected));
                } else {
                    CHECK(params[0].g(0) == 0); // the average until the guard ended
                }
            }
        }
    });
}

TEST_CASE(
    "a rank that cleared its gradients brings nothing to a guard that it enters without inputs"
) {
    over_ranks({2, 3, 4}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        DistributedDataParallel ddp{comm, params, {.gradient_kind = GradientKind::sum}};
        train(ddp, params, 3, {.will_sync = false, .weight = 3});
        params[0].g(0) = 0;
        Join guard{participants(ddp)};
        if (comm.rank() == 0) {
            train(ddp, params, 2, {.weight = 2});
            CHECK(params[0].g(0) == 1);
        }
        guard.finish();
    });
}

TEST_CASE("evaluations that open an epoch do not hide that gradients are cleared") {
    enum class Evaluation { clears, fails, is_skipped };
    over_ranks({1, 2, 4}, [](RankCommunicator& comm) {
        for (Evaluation const how :
             {Evaluation::clears, Evaluation::fails, Evaluation::is_skipped}) {
            CAPTURE(static_cast<int>(how));
            Params params = make_params<double>({1});
            DistributedDataParallel ddp{comm, params, {.gradient_kind = GradientKind::sum}};
            train(ddp, params, 4, {.will_sync = false, .weight = 4});
            Join guard{participants(ddp)};
            guard.next(true, {.phase = Phase::evaluate});
            if (how == Evaluation::clears) {
                params[0].g(0) = 0;
                ddp.forward([] {});
            } else if (how == Evaluation::fails) {
                CHECK_THROWS(ddp.forward([] { throw std::runtime_error{"out of memory"}; }));
                ddp.skip();
            } else {
                ddp.skip();
            }
            params[0].g(0) = 0;
            guard.next(true, {.will_sync = false, .weight = 4});
            train(ddp, params, 4);
            guard.next(true, {.weight = 4});
            train(ddp, params, 4);
            CHECK(params[0].g(0) == 1);
            guard.finish();
        }
    });
}

TEST_CASE("outside a guard a forward pass without its backward pass takes nothing of a window") {
    over_ranks({1, 2, 4}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        DistributedDataParallel ddp{comm, params, {.gradient_kind = GradientKind::sum}};
        train(ddp, params, 3, {.will_sync = false, .weight = 3});
        ddp.forward([] {}, {.weight = 1}); // nobody uses its outputs
        CHECK_THROWS_AS(
            ddp.forward([] { throw std::runtime_error{"out of memory"}; }, {.weight = 1}),
            std::runtime_error
        );
        train(ddp, params, 1, {.weight = 1});
        CHECK(params[0].g(0) == 1);
        params[0].g(0) = 0;
        train(ddp, params, 2, {.weight = 2}); // and the window has ended
        CHECK(params[0].g(0) == 1);
    });
}

TEST_CASE("participants of a guard that hold different batches are refused by name") {
    over_ranks({1, 2, 4}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        Params others = make_params<double>({1});
        DistributedDataParallel ddp{comm, params};
        DistributedDataParallel other{comm, others};
        auto const enter = [&] { Join guard{participants(ddp, other)}; };
        train(ddp, params, 1, {.will_sync = false});
        std::string const text = thrown_by<ContractViolation>(enter).what();
        CHECK(
            text.find("a DistributedDataParallel holds 1 batches of weight 0") != std::string::npos
        );
        CHECK(text.find("discard_window()") != std::string::npos);
        train(other, others, 1, {.will_sync = false});
        CHECK_NOTHROW(enter());
        train(other, others, 1, {.will_sync = false});
        others[0].g(0) = 0;
        params[0].g(0) = 0;
        CHECK_NOTHROW(enter());
    });
}

TEST_CASE("ranks whose windows are weighted do not meet ranks whose windows are not") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        DistributedDataParallel ddp{comm, params};
        RoundNotice notice{.will_sync = false};
        if (comm.rank() != 1) {
            notice.weight = 2;
        }
        train(ddp, params, 1, notice);
        auto const enter = [&] { Join guard{participants(ddp)}; };
        auto const error = thrown_by<Mismatch>(enter);
        CHECK(error.ranks() == std::vector<int>{1});
        CHECK(
            std::string{error.what()}.find("rank 1 accumulated batches without weights") !=
            std::string::npos
        );
        ddp.discard_window();
        CHECK_NOTHROW(enter());
    });
}

TEST_CASE("a window that began with weights goes on with weights") {
    over_ranks({1, 2, 4}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        DistributedDataParallel ddp{comm, params};
        train(ddp, params, 1, {.will_sync = false, .weight = 2});
        CHECK_THROWS_AS(train(ddp, params, 1), ContractViolation);
        auto const enter = [&] { Join guard{participants(ddp), JoinOptions{.inputs = 1}}; };
        CHECK_THROWS_AS(enter(), ContractViolation);
        Join guard{participants(ddp)};
        CHECK_THROWS_AS(train(ddp, params, 1), ContractViolation);
        train(ddp, params, 1, {.weight = 2});
        CHECK(params[0].g(0) == doctest::Approx(2)); // of both batches on each rank
        guard.finish();
    });
}

TEST_CASE("what joined ranks hold with weights meets no round without them, nor the reverse") {
    for (bool const has_carry_weight : {false, true}) {
        for (bool const has_weight : {false, true}) {
            over_ranks({2, 3, 4, 8}, [&](RankCommunicator& comm) {
                CAPTURE(has_carry_weight);
                CAPTURE(has_weight);
                Params params = make_params<double>({1});
                DistributedDataParallel ddp{comm, params};
                auto const notice = [](bool syncs, bool is_weighted) {
                    RoundNotice one{.will_sync = syncs};
                    if (is_weighted) {
                        one.weight = 4;
                    }
                    return one;
                };
                auto const epoch = [&] {
                    Join guard{participants(ddp)};
                    if (comm.rank() == 0) {
                        train(ddp, params, 10, notice(false, has_carry_weight));
                    } else {
                        ddp.skip({.will_sync = false, .skips = true});
                        train(ddp, params, 2, notice(true, has_weight));
                        double const sum = 10 + 2.0 * (comm.size() - 1);
                        CHECK(params[0].g(0) == doctest::Approx(sum / comm.size()));
                    }
                    guard.finish();
                };
                if (has_carry_weight == has_weight) {
                    epoch();
                    return;
                }
                auto const error = thrown_by<Mismatch>(epoch);
                CHECK(error.ranks() == std::vector<int>{0});
                std::string const text =
                    has_weight
                        ? "rank 0 joined with batches without weights that no round has reduced, and round 1 has a "
                          "weight; give all batches between two rounds that sync a weight, or none"
                        : "rank 0 joined with batches that have weights that no round has reduced, and round 1 has no "
                          "weight; give all batches between two rounds that sync a weight, or none";
                CHECK(error.what() == text);
            });
        }
    }
}

TEST_CASE("a rank without inputs that holds weights meets no ranks that cleared theirs") {
    for (bool const carries : {false, true}) {
        over_ranks({2, 3, 4}, [&](RankCommunicator& comm) {
            Params params = make_params<double>({1});
            DistributedDataParallel ddp{comm, params};
            train(ddp, params, 10, {.will_sync = false, .weight = 4});
            bool const has_input = comm.rank() != 0;
            if (has_input) {
                ddp.discard_window();
                params[0].g(0) = 0;
            }
            auto const epoch = [&] {
                Join guard{participants(ddp), JoinOptions{.carry_accumulated = carries}};
                if (has_input) {
                    train(ddp, params, 2);
                    CHECK(params[0].g(0) == doctest::Approx(2.0 * (comm.size() - 1) / comm.size()));
                }
                guard.finish();
            };
            if (carries) {
                CHECK(thrown_by<Mismatch>(epoch).ranks() == std::vector<int>{0});
            } else {
                epoch();
            }
        });
    }
}

TEST_CASE("a rank that skips while it holds batches without weights meets no rank with a weight") {
    over_ranks({2, 3, 4}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        DistributedDataParallel ddp{comm, params};
        auto const epoch = [&] {
            Join guard{participants(ddp)};
            if (comm.rank() == 0) {
                train(ddp, params, 10, {.will_sync = false});
                ddp.skip();
            } else {
                ddp.skip({.will_sync = false, .skips = true});
                train(ddp, params, 2, {.weight = 4});
            }
            guard.finish();
        };
        CHECK_THROWS_AS(epoch(), Mismatch);
    });
}

TEST_CASE("clearing after the weight of a window was announced is an error on every rank") {
    for (bool const knows_lengths : {false, true}) {
        over_ranks({1, 2, 4}, [&](RankCommunicator& comm) { // which is aborted at the end
            Params params = make_params<double>({1});
            DistributedDataParallel ddp{comm, params};
            train(ddp, params, 1, {.will_sync = false});
            bool const clears = comm.rank() == 0;
            auto const run = [&] {
                JoinOptions options{};
                if (knows_lengths) {
                    options.inputs = 1;
                }
                Join guard{participants(ddp), options};
                if (knows_lengths && clears) {
                    params[0].g(0) = 0;
                }
                ddp.forward([] {});
                if (clears) {
                    params[0].g(0) = 0;
                }
                ddp.backward([&](auto ready) { ready(0); });
                guard.finish();
            };
            if (clears) {
                std::string const text = thrown_by<ContractViolation>(run).what();
                CHECK(
                    text.find("were cleared after their weight was announced") != std::string::npos
                );
            } else {
                CHECK_THROWS_AS(run(), joinable::PeerFailed);
            }
        });
    }
}

TEST_CASE("a batch that failed adds its weight, and zeros do not look like cleared gradients") {
    over_ranks({1, 2, 4}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        DistributedDataParallel ddp{comm, params, {.gradient_kind = GradientKind::sum}};
        Join guard{participants(ddp)};
        try {
            ddp.forward(
                [] { throw std::runtime_error{"out of memory"}; }, {.will_sync = false, .weight = 3}
            );
        } catch (std::runtime_error const&) {
            ddp.skip();
        }
        train(ddp, params, 1, {.weight = 1});
        CHECK(params[0].g(0) == doctest::Approx(0.25));
        guard.finish();
    });
}

TEST_CASE("discard_window() is refused in a round, and where ranks may know of the window") {
    over_ranks({1, 2}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        DistributedDataParallel ddp{comm, params};
        auto const refuses = [&] { CHECK_THROWS_AS(ddp.discard_window(), ContractViolation); };
        ddp.forward([] {}, {.will_sync = false});
        refuses();
        ddp.backward([](auto) {});
        {
            Join guard{participants(ddp), JoinOptions{.inputs = 2, .sync_every = 2}};
            refuses(); // all know the weights of all rounds
            train(ddp, params, 1);
            refuses();
            train(ddp, params, 1);
            guard.finish();
        }
        {
            Join guard{participants(ddp)};
            CHECK(guard.next(true, {.will_sync = false}));
            refuses(); // announced
            ddp.forward([] {}, {.will_sync = false});
            refuses();
            ddp.backward([](auto) {});
            ddp.discard_window();
            CHECK_FALSE(guard.next(false));
            guard.finish();
        }
        CHECK_NOTHROW(ddp.discard_window());
    });
}

TEST_CASE("after a window was reduced, discard_window() finds nothing between rounds") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        DistributedDataParallel ddp{comm, params, {.gradient_kind = GradientKind::sum}};
        Join guard{participants(ddp)};
        for (int window = 0; window < 2; ++window) {
            params[0].g(0) = 0;
            train(ddp, params, 4, {.will_sync = false, .weight = 4});
            train(ddp, params, 4, {.weight = 4});
            CHECK(params[0].g(0) == doctest::Approx(1));
            ddp.discard_window();
        }
        guard.finish();
    });
}

TEST_CASE(
    "discard_window() between the rounds of a guard takes the weight from all its participants"
) {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        for (bool const on_all : {true, false}) {
            Params params = make_params<double>({1});
            Params more = make_params<double>({1});
            DistributedDataParallel first{comm, params, {.gradient_kind = GradientKind::sum}};
            DistributedDataParallel second{comm, more, {.gradient_kind = GradientKind::sum}};
            Join guard{participants(first, second)};
            for (bool const syncs : {false, true}) { // 4 samples, each with a gradient of 1
                train(first, params, 4, {.will_sync = syncs, .weight = 4});
                train(second, more, 4, {.will_sync = syncs, .weight = 4});
                if (!syncs && (on_all || comm.rank() == 0)) {
                    params[0].g(0) = more[0].g(0) = 0;
                    first.discard_window();
                    second.discard_window();
                }
            }
            CHECK(params[0].g(0) == doctest::Approx(1));
            CHECK(more[0].g(0) == doctest::Approx(1));
            guard.finish();
        }
    });
}

TEST_CASE("an optimizer that averages alone forgets between rounds what a loop has accumulated") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        for (bool const is_enabled : {true, false}) {
            Params params = make_params<double>({1});
            double const before = params[0].value[0];
            joinable::ZeroRedundancyOptimizer zero{
                comm, params, joinable::Sgd{.learning_rate = 1}, {.reduces_gradients = true}
            };
            Join guard{participants(zero), JoinOptions{.enable = is_enabled}};
            CHECK(guard.next(true, {.will_sync = false, .weight = 4}));
            if (comm.rank() == 0) {
                zero.discard_window(); // what its loop computed was not finite
            }
            CHECK(guard.next(true, {.weight = 4}));
            params[0].g(0) = comm.rank();
            zero.step();
            CHECK_FALSE(guard.next(false));
            guard.finish();
            double const others = comm.size() - 1;
            double const average = 8 * others * (others + 1) / 2 / (4 + 8 * others);
            CHECK(params[0].value[0] == doctest::Approx(before - average));
        }
    });
}

TEST_CASE("rounds that did not sync are counted from one guard to the next, and from outside") {
    over_ranks({1, 2, 4}, [](RankCommunicator& comm) {
        for (bool const is_outside : {true, false}) {
            Params params = make_params<double>({1});
            DistributedDataParallel ddp{comm, params};
            if (is_outside) {
                train(ddp, params, 1, {.will_sync = false});
            } else {
                Join guard{participants(ddp)};
                train(ddp, params, 1, {.will_sync = false});
                CHECK(guard.finish().unsynced_rounds == 1);
            }
            Join guard{participants(ddp)};
            train(ddp, params, 1, {.will_sync = false});
            CHECK(guard.finish().unsynced_rounds == 2);
        }
    });
}

TEST_CASE("windows of another length and weight on each rank count in the next guard as they are") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        DistributedDataParallel ddp{comm, params, {.gradient_kind = GradientKind::sum}};
        auto const own = static_cast<std::uint64_t>(comm.rank()) + 1;
        double const each =
            static_cast<double>(own * (own + 1)); // samples with a gradient of own + 1
        {
            Join guard{participants(ddp)};
            for (std::uint64_t i = 0; i < own; ++i) {
                train(ddp, params, each, {.will_sync = false, .weight = own});
            }
            guard.finish();
        }
        Join guard{participants(ddp)};
        train(ddp, params, each, {.weight = own});
        double sum = 0;
        double weights = 0;
        for (int rank = 1; rank <= comm.size(); ++rank) {
            double const samples = rank * (rank + 1.0); // rank + 1 batches of rank
            sum += samples * (rank + 1);
            weights += samples;
        }
        CHECK(params[0].g(0) == doctest::Approx(sum / weights));
        guard.finish();
    });
}

TEST_CASE("sync_every counts training rounds, not evaluations") {
    over_ranks({1, 2, 4}, [](RankCommunicator& comm) {
        for (bool const is_enabled : {false, true}) {
            Params params = make_params<double>({1});
            DistributedDataParallel ddp{comm, params};
            Join guard{participants(ddp), {.enable = is_enabled, .sync_every = 2}};
            for (int i = 0; i < 4; ++i) {
                params[0].g(0) = i % 2 == 0 ? 0 : params[0].g(0);
                train(ddp, params, comm.rank());
                double const average = (comm.size() - 1) / 2.0;
                CHECK(params[0].g(0) == (i % 2 == 0 ? comm.rank() : 2 * average));
                ddp.forward([] {}, {.phase = Phase::evaluate});
            }
            guard.finish();
        }
    });
}

TEST_CASE("a joined rank that leaves its gradients untouched keeps its window open") {
    for (bool const skips : {false, true}) {
        over_ranks({2, 3, 4}, [&](RankCommunicator& comm) {
            Params params = make_params<double>({1});
            DistributedDataParallel ddp{
                comm,
                params,
                {.gradient_kind = GradientKind::sum, .joined_gradients = JoinedGradients::untouched}
            };
            JoinOptions const drops{.carry_accumulated = false};
            {
                Join guard{participants(ddp), drops};
                train(ddp, params, 3, {.will_sync = false, .weight = 3});
                if (comm.rank() == 0) {
                    train(ddp, params, 1, {.weight = 1});
                    CHECK(params[0].g(0) == 1);
                    params[0].g(0) = 0;
                }
                guard.finish();
            }
            CHECK(params[0].g(0) == (comm.rank() == 0 ? 0 : 3));
            Join guard{participants(ddp), drops};
            if (skips && comm.rank() != 0) {
                ddp.skip(); // sends what it held, by its weight
            } else {
                train(ddp, params, 1, {.weight = 1});
            }
            CHECK(params[0].g(0) == 1);
            guard.finish();
        });
    }
}

TEST_CASE("sharded gradients hold what a window accumulated, though the last pass does not use it"
) {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1, 1});
        joinable::ShardedDataParallel sharded{
            comm,
            params,
            joinable::Sgd{.learning_rate = 0.5},
            {.sharding = joinable::Sharding::gradients}
        };
        Join guard{participants(sharded)};
        auto const pass = [&](RoundNotice const& notice, std::vector<std::size_t> const& unused) {
            sharded.forward([] {}, notice);
            sharded.backward(
                [&](auto ready) {
                    for (std::size_t i = 2 - unused.size(); i-- > 0;) {
                        params[i].g(0) += 1 + comm.rank();
                        ready(i);
                    }
                },
                unused
            );
        };
        pass({.will_sync = false}, {});
        pass({}, {1});
        sharded.step();
        guard.finish();
        double const average = (comm.size() + 1) / 2.0;
        CHECK(params[0].value[0] == doctest::Approx(-0.5 * 2 * average));
        CHECK(params[1].value[0] == doctest::Approx(-0.5 * average));
    });
}

TEST_CASE("a sharded batch that is skipped sends nothing of gradients that its window did not use"
) {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1, 1});
        joinable::ShardedDataParallel sharded{
            comm,
            params,
            joinable::Sgd{.learning_rate = 0.5},
            {.sharding = joinable::Sharding::gradients}
        };
        Join guard{participants(sharded)};
        auto const pass = [&](RoundNotice const& notice, std::size_t uses) {
            sharded.forward([] {}, notice);
            auto const is_unused = [&](std::size_t i) { return i >= uses; };
            sharded.backward(
                [&](auto ready) {
                    for (std::size_t i = uses; i-- > 0;) {
                        params[i].g(0) = 1; // an engine that overwrites gradients never zeroes them
                        ready(i);
                    }
                },
                is_unused
            );
        };
        pass({}, 2);
        sharded.step();
        pass({.will_sync = false}, 1);
        if (comm.rank() == 0) {
            sharded.skip();
            sharded.step();
        } // the others have run out
        guard.finish();
        CHECK(params[0].value[0] == -1);
        CHECK(params[1].value[0] == -0.5);
    });
}

/// Opens a window of one batch of weight 4 in a guard of its own.
template <class Ddp>
void accumulate(Ddp& ddp, Params& params) {
    Join guard{participants(ddp)};
    train(ddp, params, 4, {.will_sync = false, .weight = 4});
    guard.finish();
}

TEST_CASE(
    "gradients that are cleared after a loop announced their weight are an error, however it opens rounds"
) {
    enum class Opens { next, ahead, early, in_round };
    for (Opens const opens : {Opens::next, Opens::ahead, Opens::early, Opens::in_round}) {
        over_ranks({1, 2, 3, 4}, [&](RankCommunicator& comm) {
            Params params = make_params<double>({1});
            DistributedDataParallel ddp{
                comm,
                params,
                {.gradient_kind = GradientKind::sum,
                 .buffer_sync = opens == Opens::in_round ? joinable::BufferSync::before_forward
                                                         : joinable::BufferSync::after_forward}
            };
            accumulate(ddp, params);
            std::string text;
            try {
                Join guard{
                    participants(ddp),
                    {.end_policy = opens == Opens::early ? joinable::EndPolicy::throw_early
                                                         : joinable::EndPolicy::drain}
                };
                auto const round = [&](RoundNotice const& notice) {
                    if (opens == Opens::next || opens == Opens::ahead) {
                        params[0].g(0) = 0;
                    }
                    ddp.forward([] {}, notice);
                    params[0].g(0) = 0;
                    ddp.backward([&](auto ready) {
                        params[0].g(0) += 4;
                        ready(0);
                    });
                };
                if (opens == Opens::ahead) {
                    std::vector<int> const batches(2);
                    for ([[maybe_unused]] int const batch :
                         guard.iterate(joinable::look_ahead, batches, [](int) {
                             return RoundNotice{.weight = 4};
                         })) {
                        round({});
                    }
                } else if (opens == Opens::next) {
                    static_cast<void>(guard.next(true, {.weight = 4}));
                    round({});
                } else {
                    round({.weight = 4});
                }
                guard.finish();
            } catch (std::exception const& error) {
                text = error.what();
            }
            CAPTURE(text);
            CHECK(
                text.find(
                    "hold 1 batches which no round has reduced were cleared after their weight was announced"
                ) != std::string::npos
            );
        });
    }
}

TEST_CASE("a rank without inputs that clears in the guard, or skips first, brings nothing") {
    for (bool const skips : {false, true}) {
        over_ranks({2, 3, 4, 8}, [&](RankCommunicator& comm) {
            Params params = make_params<double>({1});
            DistributedDataParallel ddp{comm, params, {.gradient_kind = GradientKind::sum}};
            accumulate(ddp, params);
            Join guard{participants(ddp)};
            if (skips) {
                ddp.skip({.will_sync = false});
            }
            params[0].g(0) = 0;
            if (skips || comm.rank() != 1) {
                train(ddp, params, 4, {.weight = 4});
                CHECK(params[0].g(0) == doctest::Approx(1));
            }
            guard.finish();
        });
    }
}

TEST_CASE("a forward pass that was given up before a guard does not keep what was cleared") {
    over_ranks({1, 2, 4}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        DistributedDataParallel ddp{comm, params, {.gradient_kind = GradientKind::sum}};
        CHECK_THROWS_AS(
            ddp.forward(
                [] { throw std::runtime_error{"a bad sample"}; }, {.will_sync = false, .weight = 4}
            ),
            std::runtime_error
        );
        Join guard{participants(ddp)};
        train(ddp, params, 4, {.weight = 4});
        CHECK(params[0].g(0) == 1);
        guard.finish();
    });
}

TEST_CASE(
    "gradients whose memory was freed are named where the next guard looks whether they are cleared"
) {
    struct Freed {
        joinable::AnyView value, grad;
    };
    over_ranks({1, 2}, [](RankCommunicator& comm) {
        float value = 1;
        float gradient = 1;
        auto const view = [](float* memory) {
            return joinable::AnyView{memory, joinable::DType::f32, {1}, {1}};
        };
        std::vector<Freed> params{{view(&value), view(&gradient)}};
        DistributedDataParallel ddp{comm, params, {.sync_at_end = false}};
        {
            Join guard{participants(ddp)};
            ddp.forward([] {}, {.will_sync = false});
            ddp.backward([&](auto ready) { ready(0); });
            guard.finish();
        }
        params[0].grad = view(nullptr);
        CHECK_THROWS_WITH_AS(
            (void)(Join{participants(ddp)}),
            doctest::Contains("parameter 0 has a gradient at a null pointer"),
            ContractViolation
        );
    });
}

TEST_CASE("both models of a guard forget what was cleared, and which parameters they had used") {
    over_ranks({1, 2, 3, 4}, [](RankCommunicator& comm) {
        Params one = make_params<double>({1});
        Params two = make_params<double>({1, 1});
        DistributedDataParallel first{comm, one};
        DistributedDataParallel second{comm, two, {.find_unused = true}};
        {
            Join guard{participants(first, second)};
            train(first, one, 1, {.will_sync = false});
            second.forward([] {});
            second.backward(
                [&](auto ready) {
                    two[1].g(0) += 1;
                    ready(1);
                },
                {std::size_t{0}}
            );
            guard.finish();
        }
        Join guard{participants(first, second)};
        drop_gradients(one);
        drop_gradients(two);
        first.forward([] {});
        first.backward([&](auto ready) {
            add_gradient(one[0], 1);
            ready(0);
        });
        second.forward([] {});
        second.backward(
            [&](auto ready) {
                add_gradient(two[0], 1);
                ready(0);
            },
            {std::size_t{1}}
        );
        CHECK_FALSE(two[1].grad);
        guard.finish();
    });
}

TEST_CASE("with an open window of weights an evaluation can be skipped") {
    over_ranks({1, 2, 3, 4}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        DistributedDataParallel ddp{comm, params, {.gradient_kind = GradientKind::sum}};
        Join guard{participants(ddp)};
        train(ddp, params, 4, {.will_sync = false, .weight = 4});
        if (comm.rank() == 0) {
            ddp.skip({.phase = Phase::evaluate});
        } else {
            ddp.forward([] {}, {.phase = Phase::evaluate});
        }
        train(ddp, params, 4, {.weight = 4});
        CHECK(params[0].g(0) == 1);
        guard.finish();
    });
}

TEST_CASE("a batch that a loop announced is skipped alike in a guard that is not enabled") {
    for (bool const is_enabled : {false, true}) {
        over_ranks({2, 3, 4}, [&](RankCommunicator& comm) {
            Params params = make_params<double>({1});
            DistributedDataParallel ddp{comm, params};
            Join guard{participants(ddp), {.enable = is_enabled, .sync_every = 2}};
            for (int batch = 0; batch < 4; ++batch) { // each rank skips another one
                static_cast<void>(guard.next(true));
                if (batch == comm.rank()) {
                    ddp.skip();
                } else {
                    train(ddp, params, batch + 1);
                }
                if (batch % 2 == 1) {
                    double sum = 0; // one that skips the round that syncs sends zeros
                    for (int rank = 0; rank < comm.size(); ++rank) {
                        sum += rank == batch ? 0 : rank == batch - 1 ? batch + 1 : 2 * batch + 1;
                    }
                    CHECK(params[0].g(0) == doctest::Approx(sum / comm.size()));
                    params[0].g(0) = 0;
                }
            }
            guard.finish();
        });
    }
}

TEST_CASE("a second model skips the batch that failed in the first one") {
    over_ranks({1, 2, 3, 4}, [](RankCommunicator& comm) {
        Params one = make_params<double>({1});
        Params two = make_params<double>({1});
        DistributedDataParallel first{comm, one};
        DistributedDataParallel second{comm, two};
        Join guard{participants(first, second)};
        for (int batch = 0; batch < 2; ++batch) {
            if (batch == 1 && comm.rank() == 0) {
                CHECK_THROWS_AS(
                    first.forward([] { throw std::runtime_error{"a bad sample"}; }, {.weight = 2}),
                    std::runtime_error
                );
                first.skip();
                second.skip();
            } else {
                train(first, one, 8, {.weight = 2});
                train(second, two, 8);
            }
            double const average = batch == 0 ? 8 : 8.0 * (comm.size() - 1) / comm.size();
            CHECK(one[0].g(0) == doctest::Approx(average));
            CHECK(two[0].g(0) == doctest::Approx(average));
            one[0].g(0) = two[0].g(0) = 0;
        }
        guard.finish();
    });
}

TEST_CASE("no_sync() may say what a loop has said") {
    for (bool const is_enabled : {false, true}) {
        over_ranks({1, 2, 4}, [&](RankCommunicator& comm) {
            Params params = make_params<double>({1});
            DistributedDataParallel ddp{comm, params, {.gradient_kind = GradientKind::sum}};
            Join guard{participants(ddp), {.enable = is_enabled}};
            static_cast<void>(guard.next(true, {.will_sync = false, .weight = 4}));
            {
                auto const accumulates = ddp.no_sync();
                train(ddp, params, 4);
            }
            static_cast<void>(guard.next(true, {.weight = 4}));
            train(ddp, params, 4);
            CHECK(params[0].g(0) == 1);
            guard.finish();
        });
    }
}

TEST_CASE("a group of parameters is not added while gradients hold what no round has reduced") {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        Params more = make_params<double>({1});
        joinable::ShardedDataParallel sharded{
            comm,
            params,
            joinable::Sgd{.learning_rate = 1},
            {.sharding = joinable::Sharding::gradients}
        };
        sharded.forward([] {}, {.will_sync = false});
        sharded.backward([&](auto ready) {
            params[0].g(0) += 1;
            ready(0);
        });
        CHECK_THROWS_AS(
            sharded.add_parameter_group(more, joinable::Sgd{.learning_rate = 1}), ContractViolation
        );
        sharded.discard_window();
        sharded.add_parameter_group(more, joinable::Sgd{.learning_rate = 1});
    });
}

TEST_CASE("a step hears of the window that the round reduces, in a guard that is not enabled, too"
) {
    for (bool const is_enabled : {false, true}) {
        for (bool const by_next : {false, true}) {
            over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
                Params params = make_params<double>({1});
                DistributedDataParallel ddp{comm, params};
                std::vector<Round> rounds;
                joinable::Step step{comm, [&](Round const& round) { rounds.push_back(round); }};
                train(ddp, params, 1, {.will_sync = false, .weight = 1});
                Join guard{participants(ddp, step), {.enable = is_enabled}};
                for (bool const syncs : {false, true, true}) {
                    RoundNotice const notice{.will_sync = syncs, .weight = 2};
                    if (by_next) {
                        static_cast<void>(guard.next(true, notice));
                    }
                    train(ddp, params, 1, notice);
                    CHECK(guard.round().will_sync() == syncs);
                    if (syncs) {
                        step.step();
                    }
                }
                guard.finish();
                CHECK(guard.round().number() == 2);
                CHECK(rounds[0].number() == 1);
                CHECK(rounds[0].is_weighted());
                CHECK(rounds[0].weight() == 5);
                CHECK(rounds[0].accumulated_rounds() == 2);
                CHECK(rounds[1].weight() == 2);
                CHECK(rounds[1].accumulated_rounds() == 0);
            });
        }
    }
}

TEST_CASE("what is cleared after a round was announced takes nothing of that round, in any guard") {
    for (bool const is_enabled : {false, true}) {
        for (bool const by_next : {false, true}) {
            over_ranks({1, 2, 4}, [&](RankCommunicator& comm) {
                Params of_a = make_params<double>({1});
                Params of_b = make_params<double>({1});
                DistributedDataParallel a{comm, of_a, {.gradient_kind = GradientKind::sum}};
                DistributedDataParallel b{comm, of_b, {.gradient_kind = GradientKind::sum}};
                train(a, of_a, 1, {.will_sync = false, .weight = 1});
                train(b, of_b, 1, {.will_sync = false, .weight = 1});
                Join guard{participants(a, b), {.enable = is_enabled}};
                for (bool const syncs : {false, true}) {
                    RoundNotice const notice{.will_sync = syncs, .weight = 2};
                    if (by_next) {
                        static_cast<void>(guard.next(true, notice));
                    }
                    if (!syncs) {
                        of_a[0].g(0) = 0;
                        of_b[0].g(0) = 0;
                    }
                    train(a, of_a, 2, notice);
                    train(b, of_b, 2, notice);
                }
                guard.finish();
                CHECK(of_a[0].g(0) == 1);
                CHECK(of_b[0].g(0) == 1);
            });
        }
    }
}

TEST_CASE("a step hears of what was cleared after a loop announced the round, in any guard") {
    for (bool const is_enabled : {false, true}) {
        over_ranks({1, 2, 4}, [&](RankCommunicator& comm) {
            Params params = make_params<double>({1});
            DistributedDataParallel ddp{comm, params};
            Round seen;
            joinable::Step step{comm, [&](Round const& round) { seen = round; }};
            train(ddp, params, 1, {.will_sync = false, .weight = 1});
            Join guard{participants(ddp, step), {.enable = is_enabled}};
            static_cast<void>(guard.next(true, {.will_sync = false, .weight = 2}));
            params[0].g(0) = 0;
            train(ddp, params, 2);
            static_cast<void>(guard.next(true, {.weight = 2}));
            train(ddp, params, 2);
            step.step();
            guard.finish();
            CHECK(seen.weight() == 4);
            CHECK(seen.accumulated_rounds() == 1);
        });
    }
}

TEST_CASE("in a guard that is not enabled two models clear their windows within a round that syncs"
) {
    over_ranks({1, 2, 4}, [](RankCommunicator& comm) {
        Params of_a = make_params<double>({1});
        Params of_b = make_params<double>({1});
        DistributedDataParallel a{comm, of_a, {.gradient_kind = GradientKind::sum}};
        DistributedDataParallel b{comm, of_b, {.gradient_kind = GradientKind::sum}};
        train(a, of_a, 1, {.will_sync = false, .weight = 1});
        train(b, of_b, 1, {.will_sync = false, .weight = 1});
        Join guard{participants(a, b), {.enable = false}};
        a.forward([] {}, {.weight = 2});
        b.forward([] {}, {.weight = 2});
        of_a[0].g(0) = 0;
        of_b[0].g(0) = 0;
        auto const finish = [](auto& ddp, Params& params) {
            ddp.backward([&](auto ready) {
                params[0].g(0) += 2;
                ready(0);
            });
            CHECK(params[0].g(0) == 1);
        };
        finish(a, of_a);
        finish(b, of_b);
        guard.finish();
    });
}

TEST_CASE("in a guard that is not enabled a pass that is run again belongs to the same round") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        DistributedDataParallel ddp{comm, params};
        Join guard{participants(ddp), {.enable = false, .sync_every = 2}};
        for (int batch = 0; batch < 4; ++batch) {
            params[0].g(0) = batch % 2 == 0 ? 0 : params[0].g(0);
            if (batch == 1 && comm.rank() == 0) {
                auto const fails = [] { throw std::runtime_error{"a bad sample"}; };
                CHECK_THROWS_AS(ddp.forward(fails), std::runtime_error);
            }
            train(ddp, params, 2);
            CHECK(params[0].g(0) == (batch % 2 == 0 ? 2 : 4));
        }
        CHECK(guard.round().number() == 3);
        CHECK(guard.finish().own_rounds == 4);
    });
}

TEST_CASE("in a guard that is not enabled a second model runs its pass again in the same round") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        Params of_a = make_params<double>({1});
        Params of_b = make_params<double>({1});
        auto const options = joinable::DataParallelOptions{.gradient_kind = GradientKind::sum};
        DistributedDataParallel a{comm, of_a, options};
        DistributedDataParallel b{comm, of_b, options};
        Round seen;
        joinable::Step step{comm, [&](Round const& round) { seen = round; }};
        Join guard{
            participants(a, b, step), {.enable = false, .weight_per_input = 2, .sync_every = 2}
        };
        for (int batch = 0; batch < 4; ++batch) {
            if (batch % 2 == 0) {
                of_a[0].g(0) = of_b[0].g(0) = 0;
            }
            train(a, of_a, 2);
            if (batch % 2 == 1 && comm.rank() == 0) {
                auto const fails = [] { throw std::runtime_error{"a bad sample"}; };
                CHECK_THROWS_AS(b.forward(fails), std::runtime_error);
            }
            train(b, of_b, 2);
            CHECK(of_a[0].g(0) == (batch % 2 == 0 ? 2 : 1));
            CHECK(of_b[0].g(0) == (batch % 2 == 0 ? 2 : 1));
            if (batch % 2 == 1) {
                step.step();
                CHECK(seen.accumulated_rounds() == 1);
                CHECK(seen.weight() == 4);
            }
        }
        CHECK(guard.finish().own_rounds == 4);
    });
}

TEST_CASE("in a guard that is not enabled a pass that is refused is not a round, however often") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        DistributedDataParallel ddp{comm, params, {.gradient_kind = GradientKind::sum}};
        Join guard{participants(ddp), {.enable = false, .weight_per_input = 2, .sync_every = 2}};
        params[0].g(0) = 0;
        train(ddp, params, 2);
        if (comm.rank() == 0) {
            auto const fails = [] { throw std::runtime_error{"a bad sample"}; };
            CHECK_THROWS_AS(ddp.forward(fails), std::runtime_error);
            RoundNotice const too_heavy{.weight = ~std::uint64_t{0}};
            for (int attempt = 0; attempt < 3; ++attempt) {
                CHECK_THROWS_AS(ddp.forward([] {}, too_heavy), joinable::ContractViolation);
            }
        }
        train(ddp, params, 2);
        CHECK(params[0].g(0) == 1);
        CHECK(guard.finish().own_rounds == 2);
    });
}

TEST_CASE("in a guard that is not enabled each model counts what it says itself") {
    over_ranks({1, 2, 4}, [](RankCommunicator& comm) {
        Params of_a = make_params<double>({1});
        Params of_b = make_params<double>({1});
        DistributedDataParallel a{comm, of_a, {.gradient_kind = GradientKind::sum}};
        DistributedDataParallel b{comm, of_b, {.gradient_kind = GradientKind::sum}};
        Join guard{participants(a, b), {.enable = false}};
        for (bool const syncs : {false, true}) {
            of_a[0].g(0) = 0;
            train(a, of_a, 2, {.weight = 2});
            train(b, of_b, 2, {.will_sync = syncs, .weight = 2});
            CHECK(of_a[0].g(0) == 1);
        }
        CHECK(of_b[0].g(0) == 1);
        guard.finish();
    });
}

TEST_CASE("an optimizer that averages alone counts what a loop has accumulated, in any guard") {
    for (bool const is_enabled : {false, true}) {
        over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
            Params params = make_params<double>({1});
            joinable::ZeroRedundancyOptimizer zero{
                comm, params, joinable::Sgd{.learning_rate = 1}, {.reduces_gradients = true}
            };
            auto const weight = static_cast<std::uint64_t>(comm.rank()) + 1;
            double sum = 0;
            double total = 0;
            for (int rank = 0; rank < comm.size(); ++rank) {
                sum += (rank + 1.0) * (rank + 2.0);
                total += rank + 2.0;
            }
            {
                Join guard{participants(zero), {.enable = is_enabled}};
                for (bool const syncs : {false, true}) {
                    guard.next(true, {.will_sync = syncs, .weight = syncs ? 1 : weight});
                    params[0].g(0) = comm.rank() + 1;
                    if (syncs) {
                        zero.step();
                    }
                }
                guard.next(true, {.will_sync = false, .weight = weight});
                guard.finish();
            }
            CHECK(params[0].value[0] == doctest::Approx(-sum / total));
            Join guard{participants(zero), {.enable = is_enabled}}; // goes on with the window
            guard.next(true, {.weight = 1});
            zero.step();
            guard.finish();
            CHECK(params[0].value[0] == doctest::Approx(-2 * sum / total));
        });
    }
}

TEST_CASE("a skip that gives the weight 0 keeps the period of default notices, in any guard") {
    for (bool const is_enabled : {false, true}) {
        for (bool const has_default : {false, true}) {
            over_ranks({1, 2, 3, 4}, [&](RankCommunicator& comm) {
                Params params = make_params<double>({1});
                DistributedDataParallel ddp{comm, params, {.gradient_kind = GradientKind::sum}};
                JoinOptions options{.enable = is_enabled, .sync_every = 2};
                if (has_default) {
                    options.weight_per_input = 4;
                }
                Join guard{participants(ddp), options};
                for (int batch = 0; batch < 2; ++batch) {
                    if (comm.rank() == 0 && batch == 0) {
                        ddp.skip({.weight = 0});
                    } else if (has_default) {
                        train(ddp, params, 4);
                    } else { // what notices say themselves: each round syncs
                        train(ddp, params, 4, {.weight = 4});
                    }
                    bool const syncs = !has_default || batch == 1;
                    bool const has_trained = batch == 1 || comm.size() > 1;
                    if (syncs) {
                        CHECK(params[0].g(0) == doctest::Approx(has_trained ? 1 : 0));
                        params[0].g(0) = 0;
                    }
                }
                guard.finish();
            });
        }
    }
}

TEST_CASE("a model runs no pass in a round that its rank skips, in any guard") {
    for (bool const is_enabled : {false, true}) {
        for (bool const by_loop : {false, true}) {
            over_ranks({1, 2, 3}, [&](RankCommunicator& comm) {
                Params one = make_params<double>({1});
                Params two = make_params<double>({1});
                DistributedDataParallel first{comm, one};
                DistributedDataParallel second{comm, two};
                bool const skips = comm.rank() == 0;
                std::string text;
                try {
                    Join guard{participants(first, second), {.enable = is_enabled}};
                    if (by_loop) {
                        guard.next(true, {.skips = skips});
                    }
                    if (skips) {
                        first.skip();
                    } else {
                        train(first, one, 1);
                    }
                    train(second, two, 1);
                    guard.finish();
                } catch (std::exception const& error) {
                    text = error.what();
                }
                CAPTURE(text);
                CHECK(
                    text.find(
                        "this round was announced as skipped on this rank, by the skip() of another participant or "
                        "by RoundNotice::skips, so the gradients of this pass would not count; skip() this "
                        "participant, too"
                    ) != std::string::npos
                );
            });
        }
    }
}

TEST_CASE("zeros of one model are gradients where another one's are not cleared, in any guard") {
    for (bool const is_enabled : {false, true}) {
        over_ranks({1, 2, 4}, [&](RankCommunicator& comm) {
            Params one = make_params<double>({1});
            Params two = make_params<double>({1});
            DistributedDataParallel first{comm, one, {.gradient_kind = GradientKind::sum}};
            DistributedDataParallel second{comm, two, {.gradient_kind = GradientKind::sum}};
            for (bool const syncs : {false, true}) {
                Join guard{participants(first, second), {.enable = is_enabled}};
                train(first, one, 2, {.will_sync = syncs, .weight = 2});
                train(second, two, syncs ? 2 : 0, {.will_sync = syncs, .weight = 2});
                guard.finish();
            }
            CHECK(one[0].g(0) == 1);
            CHECK(two[0].g(0) == 0.5);
            for (bool const syncs : {false, true}) { // all are cleared: forgotten, as ever
                one[0].g(0) = two[0].g(0) = 0;
                Join guard{participants(first, second), {.enable = is_enabled}};
                train(first, one, 2, {.will_sync = syncs, .weight = 2});
                train(second, two, 2, {.will_sync = syncs, .weight = 2});
                guard.finish();
            }
            CHECK(one[0].g(0) == 1);
            CHECK(two[0].g(0) == 1);
        });
    }
}

} // namespace
