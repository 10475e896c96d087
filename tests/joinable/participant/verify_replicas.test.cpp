// SPDX-License-Identifier: BSL-1.0
// verify_replicas: ranks whose values differ hear of it in the next round that compares, and where a guard ends.
#include <joinable/participant/detail/model_checks.hpp>

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/linear_model.hpp>

#include <joinable/communicator/collectives.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/shadowed.hpp>
#include <joinable/participant/sharded/zero_redundancy_optimizer.hpp>
#include <joinable/participant/step.hpp>
#include <joinable/tensor/strided_view.hpp>

namespace {

using namespace joinable_tests;
using joinable::DataParallelOptions;
using joinable::DistributedDataParallel;
using joinable::Join;
using joinable::Mismatch;
using joinable::participants;
using joinable::Sgd;
using joinable::Step;

using Params = std::vector<Param<double>>;

void step(Params& params) {
    for (auto& param : params) {
        for (std::size_t i = 0; i < param.value.size(); ++i) {
            param.value[i] -= 0.5 * param.g(i);
            param.g(i) = 0;
        }
    }
}
template <class Ddp>
void backward(Ddp& ddp, Params& params, int rank) {
    ddp.backward([&](auto ready) {
        for (std::size_t p = params.size(); p-- > 0;) {
            add_gradient(params[p], rank + 1);
            ready(p);
        }
    });
}

enum class Stepper { none, step, shards };

/// What happened on one rank: how many of its rounds began, and the text of a difference.
struct Outcome {
    std::size_t rounds = 0;
    std::string text;
    std::vector<int> ranks;
};

/// Rank r trains `lengths[r]` rounds. Before `spoiled` does something to its values in round `when`, counted from
/// 0 (rounds that it shadows do not count), all values are equal.
template <class Comm, class Spoil>
Outcome train(
    Comm& comm,
    Stepper stepper,
    std::vector<std::size_t> const& lengths,
    DataParallelOptions const& options,
    Spoil const& spoil
) {
    Params params = make_params<double>({3, 1, 5}, 1.0);
    params[1].name = "bias";
    DistributedDataParallel ddp{comm, params, options};
    Outcome outcome;
    auto const loop = [&](auto& guard, auto const& after) {
        for (; outcome.rounds < lengths[static_cast<std::size_t>(comm.rank())]; ++outcome.rounds) {
            spoil(params, outcome.rounds, false);
            ddp.forward([] {});
            backward(ddp, params, comm.rank());
            after();
        }
        spoil(params, outcome.rounds, true);
        guard.finish();
    };
    try {
        if (stepper == Stepper::none) {
            Join guard{participants(ddp)};
            loop(guard, [&] { step(params); });
        } else if (stepper == Stepper::step) {
            Step stepping{comm, [&] { step(params); }};
            Join guard{participants(ddp, stepping)};
            loop(guard, [&] { stepping.step(); });
        } else {
            joinable::ZeroRedundancyOptimizer zero{comm, params, Sgd{.learning_rate = 0.5}};
            Join guard{participants(ddp, zero)};
            loop(guard, [&] {
                zero.step();
                for (auto& param : params) {
                    std::fill(param.storage.begin(), param.storage.end(), 0.0);
                }
            });
        }
    } catch (Mismatch const& error) {
        outcome.text = error.what();
        outcome.ranks = error.ranks();
    }
    return outcome;
}

std::vector<std::size_t> uneven(int ranks) {
    std::vector<std::size_t> lengths;
    for (int rank = 0; rank < ranks; ++rank) {
        lengths.push_back(static_cast<std::size_t>(2 + (ranks - rank) % 3 + (rank == 0 ? 4 : 0)));
    }
    return lengths;
}

TEST_CASE(
    "ranks with equal replicas train as without verify_replicas, whatever steps, and however often they compare"
) {
    for (std::size_t const every : {1U, 2U, 3U}) {
        for (Stepper const stepper : {Stepper::none, Stepper::step, Stepper::shards}) {
            over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
                auto const lengths = uneven(comm.size());
                auto const outcome =
                    train(comm, stepper, lengths, {.verify_replicas = every}, [](auto const&...) {
                    });
                CHECK(outcome.text == "");
                CHECK(outcome.rounds == lengths[static_cast<std::size_t>(comm.rank())]);
            });
        }
    }
}

TEST_CASE(
    "all ranks hear which one changed a value, and of which parameter, in the next round that compares"
) {
    for (std::size_t const every : {1U, 2U, 3U}) {
        for (bool const is_listed_first : {false, true}) { // the culprit
            over_ranks({2, 3, 4, 8}, [&](RankCommunicator& comm) {
                int const culprit = is_listed_first ? 0 : comm.size() - 1;
                std::size_t const when = 2;
                auto const outcome = train(
                    comm,
                    Stepper::step,
                    std::vector<std::size_t>(8, 9),
                    {.verify_replicas = every},
                    [&](Params& params, std::size_t round, bool) {
                        if (comm.rank() == culprit && round == when) {
                            params[1].value[0] = -params[1].value[0];
                            params[2].value[4] += 1e-15;
                        }
                    }
                );
                CAPTURE(outcome.text);
                // Rounds every - 1, 2 * every - 1, ... compare.
                CHECK(outcome.rounds == (when / every + 1) * every - 1);
                CHECK(
                    outcome.text.find(
                        "replicas differ: parameter 1 (bias): rank 0 has values of hash "
                    ) == 0
                );
                CHECK(
                    outcome.text.find("start all ranks from the same values") != std::string::npos
                );
                if (is_listed_first) { // all others differ from rank 0
                    CHECK(outcome.ranks.size() == static_cast<std::size_t>(comm.size() - 1));
                } else {
                    CHECK(outcome.ranks == std::vector{culprit});
                }
            });
        }
    }
}

TEST_CASE("a joined rank's values are compared where it steps, and not where it does not") {
    for (Stepper const stepper : {Stepper::none, Stepper::step, Stepper::shards}) {
        over_ranks({2, 3, 4, 8}, [&](RankCommunicator& comm) {
            int const culprit = comm.size() - 1;
            std::vector<std::size_t> lengths(8, 5);
            lengths[static_cast<std::size_t>(culprit)] = 2;
            auto const outcome = train(
                comm,
                stepper,
                lengths,
                {.verify_replicas = 1},
                [&](Params& params, std::size_t, bool is_over) {
                    if (comm.rank() == culprit && is_over) {
                        params[0].value[2] += 1;
                    }
                }
            );
            bool const is_found = stepper != Stepper::none;
            CAPTURE(outcome.text);
            CHECK((outcome.text.find("replicas differ: parameter 0") == 0) == is_found);
            CHECK(
                outcome.rounds == lengths[static_cast<std::size_t>(comm.rank())] -
                                      (is_found && comm.rank() != culprit ? 3 : 0)
            );
            if (is_found) {
                CHECK(outcome.ranks == std::vector{culprit});
            }
        });
    }
}

TEST_CASE(
    "where a guard ends the ranks that trained to its end are compared, before one of them sends its values"
) {
    for (bool const is_last : {false, true}) { // the culprit is the last joiner, or joins early
        over_ranks({3, 4, 8}, [&](RankCommunicator& comm) {
            int const culprit = 1;
            std::vector<std::size_t> lengths(8, 4);
            lengths[culprit] = is_last ? 4 : 1;
            auto const outcome = train(
                comm,
                Stepper::none,
                lengths,
                {.verify_replicas = 100},
                [&](Params& params, std::size_t, bool is_over) {
                    if (comm.rank() == culprit && is_over) {
                        params[2].value[0] += 1;
                    }
                }
            );
            CAPTURE(outcome.text);
            CHECK((outcome.text.find("replicas differ: parameter 2") == 0) == is_last);
            CHECK((outcome.ranks == std::vector{culprit}) == is_last);
        });
    }
}

TEST_CASE("outside guards ranks compare, too, and a skipped batch is a round") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        Params params = make_params<double>({4});
        DistributedDataParallel ddp{comm, params, {.verify_replicas = 3}};
        std::size_t rounds = 0;
        auto const run = [&] {
            for (; rounds < 6; ++rounds) {
                if (rounds % 2 == 0 && comm.rank() == 0) {
                    ddp.skip();
                } else {
                    ddp.forward([] {});
                    backward(ddp, params, comm.rank());
                }
                step(params);
                if (comm.rank() == 1 && rounds == 3) {
                    params[0].value[3] += 1;
                }
            }
        };
        CHECK_THROWS_AS(run(), Mismatch);
        CHECK(rounds == 5);
    });
}

TEST_CASE("frozen parameters are not compared, and one that only some ranks froze is named") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        Params params = make_params<double>({4, 2});
        params[0].requires_grad = false;
        DistributedDataParallel ddp{comm, params, {.find_unused = true, .verify_replicas = 1}};
        params[0].value[1] = comm.rank();
        auto const round = [&] {
            ddp.forward([] {});
            ddp.backward([&](auto ready) {
                if (params[1].requires_grad) {
                    add_gradient(params[1], 1);
                    ready(1);
                }
            });
        };
        round();
        params[1].requires_grad = comm.rank() != 1;
        std::string text;
        try {
            round();
        } catch (Mismatch const& error) {
            text = error.what();
        }
        CAPTURE(text);
        CHECK(text.find("parameter 1: rank 0 has values of hash") != std::string::npos);
        CHECK(text.find("rank 1 has no trained value") != std::string::npos);
    });
}

TEST_CASE("known lengths and look-ahead compare like roll calls") {
    for (bool const knows_lengths : {false, true}) {
        over_ranks({2, 3, 4, 8}, [&](RankCommunicator& comm) {
            Params params = make_params<double>({4});
            DistributedDataParallel ddp{comm, params, {.verify_replicas = 2}};
            Step stepping{comm, [&] { step(params); }};
            std::vector<int> const data(static_cast<std::size_t>(4 + comm.rank()));
            joinable::JoinOptions options;
            if (knows_lengths) {
                options.inputs = data.size();
            }
            std::size_t rounds = 0;
            auto const run = [&] {
                Join guard{participants(ddp, stepping), options};
                auto const train_batch = [&] {
                    ddp.forward([] {});
                    backward(ddp, params, comm.rank());
                    stepping.step();
                    if (comm.rank() == 0 && ++rounds == 3) {
                        params[0].value[0] += 1;
                    }
                };
                if (knows_lengths) {
                    for ([[maybe_unused]] int const batch : guard.iterate(data)) {
                        train_batch();
                    }
                } else {
                    for ([[maybe_unused]] int const batch :
                         guard.iterate(joinable::look_ahead, data)) {
                        train_batch();
                    }
                }
                guard.finish();
            };
            CHECK_THROWS_AS(run(), Mismatch);
        });
    }
}

TEST_CASE(
    "ranks compare where joined ranks have followed the collectives of a forward pass" *
    doctest::test_suite("[split]")
) {
    over_ranks({2, 3, 4}, [](RankCommunicator& comm) {
        auto own = joinable::shadowed(comm);
        Params params = make_params<double>({4});
        DistributedDataParallel ddp{comm, params, {.verify_replicas = 1}};
        ddp.attach_collectives(own);
        Join guard{participants(ddp)};
        for (int k = 0; k <= comm.rank(); ++k) {
            ddp.forward([&] {
                double sum = 1;
                joinable::all_reduce(own, std::span{&sum, 1}).wait();
                CHECK(sum == comm.size() - k);
            });
            backward(ddp, params, comm.rank());
        }
        CHECK(guard.finish().rounds == static_cast<std::size_t>(comm.size()));
    });
}

} // namespace
