// SPDX-License-Identifier: BSL-1.0
// step(closure): the closure is the loop's body. The oracle: one rank in double.
#include <joinable/join/joinable.hpp>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <over_ranks.hpp>
#include <support/linear_model.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/sharded/data_parallel.hpp>
#include <joinable/participant/sharded/zero_redundancy_optimizer.hpp>
#include <joinable/participant/step.hpp>

namespace {

using namespace joinable_tests;
using joinable::DistributedDataParallel;
using joinable::Join;
using joinable::participants;
using joinable::Sgd;
using joinable::ShardedDataParallel;
using joinable::Sharding;
using joinable::Step;
using joinable::ZeroRedundancyOptimizer;

constexpr double rate = 0.25;
std::vector<std::size_t> const sizes{1, 3, 2};

int inputs_of_rank(int rank) {
    return 1 + rank;
}
double slope_of(int rank, int round) {
    return 1 + (rank * 3 + round) % 5;
}

/// The values after all rounds: the gradient of rank r in its round t is slope_of(r, t) for all elements.
double trained(int world) {
    double value = 0;
    for (int round = 0; round < inputs_of_rank(world - 1); ++round) {
        for (int rank = 0; rank < world; ++rank) {
            bool const is_active = round < inputs_of_rank(rank);
            value -= is_active ? rate * slope_of(rank, round) / world : 0.0;
        }
    }
    return value;
}

void check_values(std::vector<Param<double>> const& params, double expected) {
    for (Param<double> const& param : params) {
        for (double const value : param.value) {
            CHECK(value == doctest::Approx(expected).epsilon(1e-12));
        }
    }
}

/// A pass whose gradients are all `slope`.
template <class Model>
void pass(Model& model, std::vector<Param<double>>& params, double slope) {
    drop_gradients(params);
    model.forward([] {});
    model.backward([&](auto ready) {
        for (std::size_t i = params.size(); i-- > 0;) {
            add_gradient(params[i], slope);
            ready(i);
        }
    });
}

/// What the last rank, alone in its last round, throws in a closure, and what the others get.
template <class MakeGuard, class F>
void check_throw(RankCommunicator& comm, MakeGuard const& make_guard, F const& round) {
    bool const throws = comm.rank() == comm.size() - 1;
    std::string text;
    try {
        auto&& guard = make_guard();
        for (int i = 0; i < inputs_of_rank(comm.rank()); ++i) {
            round(throws && i + 1 == inputs_of_rank(comm.rank()));
        }
        guard.finish();
    } catch (joinable::PeerFailed const& error) {
        CHECK(error.rank() == comm.size() - 1);
        text = error.what();
    } catch (std::runtime_error const& error) {
        CHECK(throws);
        CHECK(std::string{error.what()} == "the loss is not finite");
        return;
    }
    CHECK(!throws);
    CAPTURE(text);
    CHECK(text.find("the loss is not finite") != std::string::npos);
}

TEST_CASE(
    "a step with a closure runs it once on each active rank, before the step, and returns its loss"
) {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        std::vector<Param<double>> params = make_params<double>(sizes);
        DistributedDataParallel ddp{comm, params};
        ZeroRedundancyOptimizer zero{comm, params, Sgd{.learning_rate = rate}};
        Join guard{participants(ddp, zero)};
        int runs = 0;
        for (int i = 0; i < inputs_of_rank(comm.rank()); ++i) {
            double const before = params[0].value[0];
            double const loss = zero.step([&] {
                ++runs;
                CHECK(params[0].value[0] == before);
                pass(ddp, params, slope_of(comm.rank(), i));
                return 10.0 + i;
            });
            CHECK(loss == 10.0 + i);
        }
        guard.finish();
        CHECK(runs == inputs_of_rank(comm.rank())); // joined ranks do not run it
        check_values(params, trained(comm.size()));
    });
}

TEST_CASE("each optimizer that steps takes a closure, and a weight beside it where step() has one"
) {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        double const expected = trained(comm.size());
        for (Sharding const sharding : {Sharding::none, Sharding::optimizer, Sharding::gradients}) {
            std::vector<Param<double>> params = make_params<double>(sizes);
            ShardedDataParallel sharded{
                comm, params, Sgd{.learning_rate = rate}, {.sharding = sharding}
            };
            Join guard{participants(sharded)};
            for (int i = 0; i < inputs_of_rank(comm.rank()); ++i) {
                CHECK(sharded.step([&] {
                    pass(sharded, params, slope_of(comm.rank(), i));
                    return i;
                }) == i);
            }
            guard.finish();
            check_values(params, expected);
        }
        {
            std::vector<Param<double>> params = make_params<double>(sizes);
            DistributedDataParallel ddp{comm, params};
            Step step{comm, [&] {
                          for (Param<double>& param : params) {
                              for (std::size_t k = 0; k < param.value.size(); ++k) {
                                  param.value[k] -= rate * param.g(k);
                              }
                          }
                      }};
            Join guard{participants(ddp, step)};
            for (int i = 0; i < inputs_of_rank(comm.rank()); ++i) {
                CHECK(step.step([&] {
                    pass(ddp, params, slope_of(comm.rank(), i));
                    return i;
                }) == i);
            }
            guard.finish();
            check_values(params, expected);
        }
        // Alone, weighted by 1 + rank: the mean of the slopes of active ranks by these weights.
        std::vector<Param<double>> params = make_params<double>(sizes);
        ZeroRedundancyOptimizer zero{
            comm, params, Sgd{.learning_rate = rate}, {.reduces_gradients = true}
        };
        Join guard{participants(zero)};
        for (int i = 0; i < inputs_of_rank(comm.rank()); ++i) {
            joinable::RoundNotice const notice{.weight = 1 + static_cast<unsigned>(comm.rank())};
            auto const fill = [&] {
                drop_gradients(params);
                for (Param<double>& param : params) {
                    add_gradient(param, slope_of(comm.rank(), i));
                }
            };
            zero.step(fill, notice);
        }
        guard.finish();
        double value = 0;
        for (int round = 0; round < inputs_of_rank(comm.size() - 1); ++round) {
            double sum = 0;
            double weights = 0;
            for (int rank = 0; rank < comm.size(); ++rank) {
                if (round < inputs_of_rank(rank)) {
                    sum += (1 + rank) * slope_of(rank, round);
                    weights += 1 + rank;
                }
            }
            value -= rate * sum / weights;
        }
        check_values(params, value);
    });
}

TEST_CASE("what a closure throws reaches the other ranks with its text, and nothing is stepped") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        // Before the round is opened, and after its passes.
        for (bool const is_late : {false, true}) {
            if (comm.is_aborted()) {
                return;
            }
            std::vector<Param<double>> params = make_params<double>(sizes);
            DistributedDataParallel ddp{comm, params};
            ZeroRedundancyOptimizer zero{comm, params, Sgd{.learning_rate = rate}};
            double before = 0;
            check_throw(
                comm,
                [&] { return Join{participants(ddp, zero)}; },
                [&](bool throws) {
                    before = params[0].value[0];
                    zero.step([&] {
                        if (throws && !is_late) {
                            throw std::runtime_error{"the loss is not finite"};
                        }
                        pass(ddp, params, 1);
                        if (throws) {
                            throw std::runtime_error{"the loss is not finite"};
                        }
                    });
                }
            );
            if (comm.rank() == comm.size() - 1) {
                CHECK(params[0].value[0] == before);
            }
        }
    });
}

TEST_CASE("after a pass of the closure has thrown, the round can be skipped and stepped without one"
) {
    over_ranks({1, 2, 3, 4}, [](RankCommunicator& comm) {
        std::vector<Param<double>> params = make_params<double>(sizes);
        DistributedDataParallel ddp{comm, params};
        ZeroRedundancyOptimizer zero{comm, params, Sgd{.learning_rate = rate}};
        Join guard{participants(ddp, zero)};
        bool const is_last = comm.rank() == comm.size() - 1;
        for (int i = 0; i < 2; ++i) {
            try {
                zero.step([&] {
                    if (i == 0 && is_last) {
                        ddp.forward([] { throw std::runtime_error{"out of memory"}; });
                    }
                    pass(ddp, params, 1);
                });
            } catch (std::runtime_error const& error) {
                CHECK(std::string{error.what()} == "out of memory");
                ddp.skip();
                zero.step();
            }
        }
        guard.finish();
        double const world = comm.size();
        check_values(params, -rate * ((world - 1) / world + 1));
    });
}

TEST_CASE("a closure returns what it likes: nothing, a reference, an object that only moves") {
    over_ranks({1, 2}, [](RankCommunicator& comm) {
        std::vector<Param<double>> params = make_params<double>(sizes);
        ZeroRedundancyOptimizer zero{comm, params, Sgd{.learning_rate = rate}};
        double loss = 1;
        static_assert(std::is_void_v<decltype(zero.step([] {}))>);
        static_assert(std::is_same_v<
                      decltype(zero.step([&]() -> double& { return loss; })),
                      double&>);
        CHECK(&zero.step([&]() -> double& { return loss; }) == &loss);
        CHECK(*zero.step([] { return std::make_unique<int>(7); }) == 7);
        check_values(params, 0);
    });
}

TEST_CASE("a closure that steps itself is refused, because the round has one step") {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        std::vector<Param<double>> params = make_params<double>(sizes);
        DistributedDataParallel ddp{comm, params};
        ZeroRedundancyOptimizer zero{comm, params, Sgd{.learning_rate = rate}};
        std::string text;
        try {
            Join guard{participants(ddp, zero)};
            zero.step([&] {
                pass(ddp, params, 1);
                zero.step();
            });
            guard.finish();
        } catch (std::exception const& error) {
            text = error.what();
        }
        CAPTURE(text);
        CHECK(
            text.find("participant 1 (ZeroRedundancyOptimizer) called step()") != std::string::npos
        );
    });
}

} // namespace
