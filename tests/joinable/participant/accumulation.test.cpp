// SPDX-License-Identifier: BSL-1.0
#include <joinable/participant/data_parallel.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/linear_model.hpp>
#include <support/recording_communicator.hpp>

#include <joinable/communicator/pieces.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/participant/step.hpp>

namespace {

using namespace joinable_tests;
using joinable::DistributedDataParallel;
using joinable::GradientKind;
using joinable::Join;
using joinable::participants;

using Params = std::vector<Param<double>>;

/// One micro-batch: adds `gradient` to parameter 0's.
template <class Ddp>
void train(Ddp& ddp, Params& params, double gradient, joinable::RoundNotice const& notice = {}) {
    ddp.forward([] {}, notice);
    ddp.backward([&](auto ready) {
        params[0].g(0) += gradient;
        ready(0);
    });
}

TEST_CASE("gradients accumulate under no_sync() and are reduced in the next round that syncs") {
    for (bool const views : {false, true}) {
        over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& inner) {
            RecordingCommunicator comm{inner};
            Params params = make_params<double>({1});
            DistributedDataParallel ddp{comm, params, {.gradient_as_bucket_view = views}};
            for (bool const guarded : {false, true}) {
                params[0].g(0) = 0;
                std::optional<Join<decltype(ddp)>> guard;
                if (guarded) {
                    guard.emplace(participants(ddp));
                }
                comm.trace.clear();
                {
                    auto const quiet = ddp.no_sync();
                    train(ddp, params, 1.0);
                    {
                        auto const nested = ddp.no_sync();
                        train(ddp, params, 10.0);
                    }
                    train(ddp, params, 100.0 * comm.rank());
                }
                CHECK(params[0].g(0) == 11.0 + 100.0 * comm.rank());
                train(ddp, params, 1000.0);
                CHECK(params[0].g(0) == doctest::Approx(1011.0 + 50.0 * (comm.size() - 1)));
                std::size_t reduced = 0;
                for (std::string const& collective : comm.trace) {
                    reduced += collective == "all_reduce 1 f64" ? 1U : 0U;
                }
                CHECK(reduced == 1);
            }
        });
    }
}

TEST_CASE("a rank in the other phase of accumulation is a mismatch that names it") {
    over_ranks({2, 3, 4}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        DistributedDataParallel ddp{comm, params};
        std::string text;
        try {
            Join guard{participants(ddp)};
            train(ddp, params, 1.0, {.will_sync = comm.rank() != 1});
            guard.finish();
        } catch (joinable::Mismatch const& error) {
            text = error.what();
            CHECK(error.ranks() == std::vector{1});
        }
        CHECK(
            text == "ranks disagree about round 0: will_sync: rank 0 has true, rank 1 has false; "
                    "every active rank must open the same round"
        );
    });
}

TEST_CASE("under next() the notice given there decides, and no_sync() must agree with it") {
    over_ranks({1}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        DistributedDataParallel ddp{comm, params};
        Join guard{participants(ddp)};
        auto const quiet = ddp.no_sync();
        CHECK(guard.next(true, {.will_sync = false}));
        train(ddp, params, 1.0);
        CHECK(guard.next(true));
        std::string text;
        try {
            train(ddp, params, 1.0);
        } catch (joinable::ContractViolation const& error) {
            text = error.what();
        }
        CHECK(text.find("give the notice to next()") != std::string::npos);
    });
}

/// What rank `rank` adds in its micro-batch `i`, and with which weight.
double gradient_of(int rank, int i) {
    return 1.0 + rank + 0.25 * i;
}
std::uint64_t weight_of(int rank, int i) {
    return static_cast<std::uint64_t>(1 + (rank + i) % 3);
}
int length_of(int rank) {
    return 2 + 3 * rank % 7;
}

enum class Average { initial, active, weighted_mean, weighted_sum };

/// The reduced gradients of all rounds that sync, every third: by the formulas, serially.
std::vector<double> serial_averages(int world, Average average, bool carries) {
    std::vector<double> averages;
    int rounds = 0;
    for (int rank = 0; rank < world; ++rank) {
        rounds = std::max(rounds, length_of(rank));
    }
    for (int end = 3; end <= rounds; end += 3) {
        double sum = 0;
        double weights = 0;
        double contributors = 0;
        for (int rank = 0; rank < world; ++rank) {
            bool const is_active = length_of(rank) >= end;
            double gradient = 0;
            double weight = 0;
            for (int i = end - 3; i < std::min(end, length_of(rank)); ++i) {
                gradient += gradient_of(rank, i);
                weight += static_cast<double>(weight_of(rank, i));
            }
            if (length_of(rank) <= end - 3 || (!is_active && !carries)) {
                continue;
            }
            contributors += 1;
            weights += weight;
            sum += average == Average::weighted_mean ? weight * gradient : gradient;
        }
        bool const is_weighted =
            average == Average::weighted_mean || average == Average::weighted_sum;
        averages.push_back(
            sum / (is_weighted                   ? weights
                   : average == Average::initial ? world
                                                 : contributors)
        );
    }
    return averages;
}

TEST_CASE(
    "what a rank accumulated before it ran out flows into the next reduction, once" *
    doctest::test_suite("[long]")
) {
    for (Average const average :
         {Average::initial, Average::active, Average::weighted_mean, Average::weighted_sum}) {
        for (bool const carries : {true, false}) {
            for (bool const views : {false, true}) {
                for (bool const finds_unused : {false, true}) {
                    over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
                        CAPTURE(static_cast<int>(average));
                        CAPTURE(carries);
                        Params params = make_params<double>({1});
                        DistributedDataParallel ddp{
                            comm,
                            params,
                            {.gradient_as_bucket_view = views,
                             .find_unused = finds_unused,
                             .gradient_kind = average == Average::weighted_sum ? GradientKind::sum
                                                                               : GradientKind::mean,
                             .joined_gradients = joinable::JoinedGradients::kept}
                        };
                        auto const expected = serial_averages(comm.size(), average, carries);
                        std::vector<double> averages;
                        {
                            Join guard{
                                participants(ddp),
                                {.carry_accumulated = carries},
                                joinable::divide_by_initial_world_size = average != Average::active
                            };
                            for (int i = 0; i < length_of(comm.rank()); ++i) {
                                joinable::RoundNotice notice{.will_sync = i % 3 == 2};
                                if (average == Average::weighted_mean ||
                                    average == Average::weighted_sum) {
                                    notice.weight = weight_of(comm.rank(), i);
                                }
                                if (i % 3 == 0) {
                                    params[0].g(0) = 0;
                                }
                                train(ddp, params, gradient_of(comm.rank(), i), notice);
                                if (i % 3 == 2) {
                                    averages.push_back(params[0].g(0));
                                }
                            }
                            guard.finish();
                        }
                        REQUIRE(averages.size() <= expected.size());
                        for (std::size_t k = 0; k < averages.size(); ++k) {
                            CHECK(averages[k] == doctest::Approx(expected[k]).epsilon(1e-12));
                        }
                        // Ranks that ran out have received the last one, too.
                        int longest = 0;
                        for (int rank = 0; rank < comm.size(); ++rank) {
                            longest = std::max(longest, length_of(rank));
                        }
                        if (longest % 3 == 0 || length_of(comm.rank()) < longest / 3 * 3) {
                            CHECK(
                                params[0].g(0) == doctest::Approx(expected.back()).epsilon(1e-12)
                            );
                        }
                    });
                }
            }
        }
    }
}

TEST_CASE("several forward passes may share a backward pass: their weights add up") {
    over_ranks({1, 2, 3, 4}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        DistributedDataParallel ddp{
            comm,
            params,
            {.gradient_kind = GradientKind::sum, .joined_gradients = joinable::JoinedGradients::kept
            }
        };
        Join guard{participants(ddp)};
        int const inputs = 1 + comm.rank() % 2;
        for (int i = 0; i < inputs; ++i) {
            params[0].g(0) = 0;
            ddp.forward([] {}, {.will_sync = false, .weight = 3});
            ddp.forward([] {}, {.weight = 1});
            ddp.backward([&](auto ready) {
                params[0].g(0) = 8.0 * (comm.rank() + 1); // the sum over both batches
                ready(0);
            });
        }
        auto const result = guard.finish();
        double sum = 0;
        double weights = 0;
        bool const is_second = result.rounds == 4;
        for (int rank = 0; rank < comm.size(); ++rank) {
            if (!is_second || rank % 2 == 1) {
                sum += 8.0 * (rank + 1);
                weights += 4;
            }
        }
        CHECK(params[0].g(0) == doctest::Approx(sum / weights));
    });
}

/// A rank that ends between the passes of one backward has no gradient to bring.
TEST_CASE("a forward pass without a backward pass leaves nothing to bring along") {
    over_ranks({2, 3}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        DistributedDataParallel ddp{
            comm, params, {.joined_gradients = joinable::JoinedGradients::kept}
        };
        Join guard{participants(ddp)};
        params[0].g(0) = 99.0; // of earlier times
        ddp.forward([] {}, {.will_sync = false});
        if (comm.rank() != 0) {
            ddp.forward([] {});
            ddp.backward([&](auto ready) {
                params[0].g(0) = 6.0;
                ready(0);
            });
        }
        guard.finish();
        CHECK(params[0].g(0) == doctest::Approx(6.0 * (comm.size() - 1) / comm.size()));
    });
}

// -- failed batches ----------------------------------------------------------------------------------

enum class FailsIn { announcement, forward, backward };

TEST_CASE("a batch that fails on one rank is skipped, and the round goes on for all") {
    for (FailsIn const where : {FailsIn::announcement, FailsIn::forward, FailsIn::backward}) {
        for (bool const weighted : {false, true}) {
            for (bool const by_initial : {false, true}) {
                over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
                    CAPTURE(static_cast<int>(where));
                    Params params = make_params<double>({1});
                    params.emplace_back(2);
                    DistributedDataParallel ddp{comm, params};
                    Join guard{
                        participants(ddp), joinable::divide_by_initial_world_size = by_initial
                    };
                    joinable::RoundNotice notice;
                    if (weighted) {
                        notice.weight = 2;
                    }
                    int const bad_rank = comm.size() - 1;
                    for (int i = 0; i < 5; ++i) {
                        bool const fails = comm.rank() == bad_rank && i % 2 == 1;
                        params[0].g(0) = 7.0;
                        try {
                            if (fails && where == FailsIn::announcement) {
                                throw std::bad_alloc{};
                            }
                            ddp.forward(
                                [&] {
                                    if (fails && where == FailsIn::forward) {
                                        throw std::bad_alloc{};
                                    }
                                },
                                notice
                            );
                            ddp.backward([&](auto ready) {
                                ready(1);
                                if (fails) {
                                    throw std::bad_alloc{};
                                }
                                ready(0);
                            });
                        } catch (std::bad_alloc const&) {
                            ddp.skip();
                        }
                        if (i % 2 == 1) {
                            double const sum = 7.0 * (comm.size() - 1);
                            bool const is_known = where == FailsIn::announcement;
                            bool const by_contributors = is_known && (weighted || !by_initial);
                            double const divisor = comm.size() - (by_contributors ? 1 : 0);
                            CHECK(
                                params[0].g(0) ==
                                doctest::Approx(divisor == 0 ? 0.0 : sum / divisor)
                            );
                        } else {
                            CHECK(params[0].g(0) == doctest::Approx(7.0));
                        }
                    }
                    CHECK(guard.finish().rounds == 5);
                });
            }
        }
    }
}

TEST_CASE("what was accumulated before a skipped batch is not lost") {
    over_ranks({1, 2, 4}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        DistributedDataParallel ddp{comm, params, {.gradient_kind = GradientKind::sum}};
        Join guard{participants(ddp)};
        train(ddp, params, 3.0, {.will_sync = false, .weight = 1});
        if (comm.rank() == 0) {
            ddp.skip();
        } else {
            train(ddp, params, 5.0, {.weight = 1});
        }
        auto const others = static_cast<double>(comm.size() - 1);
        CHECK(params[0].g(0) == doctest::Approx((3.0 + 8.0 * others) / (1.0 + 2.0 * others)));
        guard.finish();
    });
}

TEST_CASE("once a bucket is on its way a failed batch fails all ranks") {
    over_ranks({2, 4}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        params.emplace_back(1);
        DistributedDataParallel ddp{
            comm, params, {.bucket_cap_bytes = 8, .first_bucket_bytes = 8, .rebuild_buckets = false}
        };
        std::string text;
        try {
            Join guard{participants(ddp)};
            ddp.forward([] {});
            try {
                ddp.backward([&](auto ready) {
                    ready(1);
                    if (comm.rank() == 1) {
                        throw std::runtime_error{"out of memory"};
                    }
                    ready(0);
                });
            } catch (std::runtime_error const&) {
                if (comm.rank() == 1) {
                    ddp.skip();
                } else {
                    throw;
                }
            }
            guard.finish();
        } catch (joinable::PeerFailed const& error) {
            CHECK(error.rank() == 1);
            text = error.what();
        } catch (joinable::ContractViolation const& error) {
            CHECK(comm.rank() == 1);
            text = error.what();
        }
        // Ranks of one machine sum gradients where they lie, so the guard may end before the program can skip: with the
        // batch's own text.
        bool const is_of_batch = joinable::detail::has_sum_of_pieces<RankCommunicator> &&
                                 text.find("out of memory") != std::string::npos;
        bool const is_of_skip =
            text.find("a batch cannot be skipped on rank 1 any more") != std::string::npos;
        CAPTURE(text);
        CHECK((is_of_batch || is_of_skip));
    });
}

TEST_CASE("peers are not told of a batch that was skipped when its rank fails later") {
    over_ranks({2, 4}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        DistributedDataParallel ddp{comm, params};
        std::string text;
        try {
            Join guard{participants(ddp)};
            try {
                ddp.forward([&] {
                    if (comm.rank() == 1) {
                        throw std::bad_alloc{};
                    }
                });
                ddp.backward([](auto ready) { ready(0); });
            } catch (std::bad_alloc const&) {
                ddp.skip();
                throw std::runtime_error{"disk full"};
            }
            guard.finish();
        } catch (std::exception const& error) {
            text = error.what();
        }
        CHECK(
            text == (comm.rank() == 1
                         ? "disk full"
                         : "rank 1 failed: an exception left the guard, whose text only that rank "
                           "knows; guard.fail(text) passes a text on")
        );
    });
}

TEST_CASE("a text that fail() was given before skip() is for the rest of the round") {
    over_ranks({2, 4}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        DistributedDataParallel ddp{comm, params};
        joinable::Step step{comm, [&] {
                                if (comm.rank() == 1) {
                                    throw std::runtime_error{"loss is NaN"};
                                }
                            }};
        std::string text;
        try {
            Join guard{participants(ddp, step)};
            try {
                ddp.forward([&] {
                    if (comm.rank() == 1) {
                        throw std::bad_alloc{};
                    }
                });
                ddp.backward([](auto ready) { ready(0); });
            } catch (std::bad_alloc const&) {
                guard.fail("shard 7 is damaged");
                ddp.skip();
            }
            step.step();
            guard.finish();
        } catch (std::exception const& error) {
            text = error.what();
        }
        CHECK(text == (comm.rank() == 1 ? "loss is NaN" : "rank 1 failed: shard 7 is damaged"));
    });
}

TEST_CASE("a batch is skipped in a round that does not sync, and outside a guard") {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        DistributedDataParallel ddp{comm, params};
        bool const fails = comm.rank() == 0;
        {
            Join guard{participants(ddp)};
            try {
                ddp.forward(
                    [&] {
                        if (fails) {
                            throw std::bad_alloc{};
                        }
                    },
                    {.will_sync = false}
                );
                ddp.backward([&](auto ready) {
                    params[0].g(0) += 4.0;
                    ready(0);
                });
            } catch (std::bad_alloc const&) {
                ddp.skip();
            }
            train(ddp, params, 2.0);
            guard.finish();
        }
        CHECK(params[0].g(0) == doctest::Approx((6.0 * (comm.size() - 1) + 2.0) / comm.size()));
        if (fails) {
            ddp.skip();
        } else {
            params[0].g(0) = 0;
            train(ddp, params, 2.0);
        }
        CHECK(params[0].g(0) == doctest::Approx(2.0 * (comm.size() - 1) / comm.size()));
    });
}

TEST_CASE("an evaluation that fails on one rank is over, and skip() ends it where next() opened it"
) {
    over_ranks({1, 2, 3, 4}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        DistributedDataParallel ddp{comm, params};
        joinable::RoundNotice const evaluates{.phase = joinable::Phase::evaluate};
        for (bool const by_next : {false, true}) {
            Join guard{participants(ddp)};
            for (int i = 0; i < 4; ++i) {
                if (by_next) {
                    guard.next(true, evaluates);
                }
                try {
                    ddp.forward(
                        [&] {
                            if (comm.rank() == comm.size() - 1 && i % 2 == 0) {
                                throw std::runtime_error{"a bad sample"};
                            }
                        },
                        by_next ? joinable::RoundNotice{} : evaluates
                    );
                } catch (std::runtime_error const&) {
                    if (by_next) {
                        ddp.skip();
                    }
                }
            }
            params[0].g(0) = 0;
            if (by_next) {
                guard.next(true);
            }
            train(ddp, params, 3.0);
            CHECK(params[0].g(0) == doctest::Approx(3.0));
            CHECK(guard.finish().rounds == 5);
        }
    });
}

TEST_CASE("whether a skipped batch has a weight is what the others say of the round, in a guard") {
    over_ranks({1, 2, 3, 4}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        DistributedDataParallel ddp{comm, params};
        bool const skips = comm.rank() == 1;
        auto const train_or_skip = [&](joinable::RoundNotice const& notice) {
            params[0].g(0) = 0;
            skips ? ddp.skip() : train(ddp, params, 3.0, notice);
        };
        {
            Join guard{participants(ddp)};
            train(ddp, params, 1.0, {.weight = 5});
            ddp.forward([] {}, {.phase = joinable::Phase::evaluate}); // has none
            train_or_skip({.weight = 5});
            CHECK(params[0].g(0) == doctest::Approx(3.0));
            guard.finish();
        }
        double const unweighted = comm.size() == 1 ? 3.0 : 3.0 * (comm.size() - 1) / comm.size();
        {
            Join guard{participants(ddp)};
            train_or_skip({});
            CHECK(params[0].g(0) == doctest::Approx(unweighted));
            train(ddp, params, 1.0, {.weight = 5});
            guard.finish();
        }
        train_or_skip({});
        CHECK(params[0].g(0) == doctest::Approx(unweighted));
    });
}

TEST_CASE("a rank whose first batch fails before any forward pass skips in weighted training") {
    for (bool const is_alone : {false, true}) { // the others have run out
        over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
            Params params = make_params<double>({1});
            DistributedDataParallel ddp{comm, params};
            double velocity = 0;
            std::vector<int> contributors;
            joinable::Step step{comm, [&](joinable::Round const& round) {
                                    velocity = velocity / 2 + params[0].g(0);
                                    contributors.push_back(round.contributor_count());
                                }};
            Join guard{participants(ddp, step)};
            if (comm.rank() == 0) {
                ddp.skip();
                step.step();
            }
            if (comm.rank() == 0 || !is_alone) {
                params[0].g(0) = 0;
                train(ddp, params, 3.0, {.weight = 4});
                step.step();
            }
            if (comm.rank() == 0) {
                ddp.skip(); // the last active rank's, of a round that all others shadow
                step.step();
            }
            guard.finish();
            int const others = is_alone ? 0 : comm.size() - 1;
            CHECK(contributors == std::vector{others, 1, 0});
            CHECK(velocity == ((others == 0 ? 0.0 : 3.0) / 2 + 3.0) / 2);
        });
    }
}

TEST_CASE("what ranks accumulated with weights is weighted where all active ranks only skip") {
    for (bool const carries : {true, false}) {
        over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
            Params params = make_params<double>({1});
            DistributedDataParallel ddp{
                comm, params, {.joined_gradients = joinable::JoinedGradients::kept}
            };
            Join guard{participants(ddp), {.carry_accumulated = carries}};
            auto const weight = static_cast<std::uint64_t>(comm.rank() + 1);
            train(ddp, params, 4.0 + comm.rank(), {.will_sync = false, .weight = weight});
            if (comm.rank() == 0) {
                ddp.skip(); // the others have run out, and what they hold has a weight
            }
            guard.finish();
            double sum = 0;
            double weights = 0;
            for (int rank = 0; rank < (carries ? comm.size() : 1); ++rank) {
                sum += (rank + 1.0) * (4.0 + rank);
                weights += rank + 1.0;
            }
            CHECK(params[0].g(0) == doctest::Approx(sum / weights));
        });
    }
}

TEST_CASE("a batch that fails after next() announced it, and before its forward pass, is skipped") {
    for (bool const says_so : {false, true}) { // or next() has announced that it is skipped
        over_ranks({1, 2, 3, 4}, [&](RankCommunicator& comm) {
            Params params = make_params<double>({1});
            DistributedDataParallel ddp{comm, params};
            Join guard{participants(ddp)};
            for (int i = 0; i < 6; ++i) {
                bool const fails = comm.rank() == comm.size() - 1 && i % 2 == 0;
                joinable::RoundNotice notice{.weight = 2, .skips = fails && says_so};
                notice.phase = i == 4 ? joinable::Phase::evaluate : joinable::Phase::train;
                CHECK(guard.next(true, notice));
                params[0].g(0) = 0;
                if (fails) {
                    ddp.skip();
                } else if (i == 4) {
                    ddp.forward([] {});
                } else {
                    train(ddp, params, 3.0);
                }
                double const sum = 3.0 * (comm.size() - (i % 2 == 0 ? 1 : 0));
                double const divisor = comm.size() - (i % 2 == 0 && says_so ? 1 : 0);
                bool const is_zero = i == 4 || divisor == 0;
                CHECK(params[0].g(0) == doctest::Approx(is_zero ? 0.0 : sum / divisor));
            }
            guard.finish();
        });
    }
}

} // namespace
