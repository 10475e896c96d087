// SPDX-License-Identifier: BSL-1.0
// Local SGD: ranks step apart, and average their values now and then.
#include <joinable/participant/periodic_average.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/linear_model.hpp>
#include <support/thrown_by.hpp>
#include <support/wide_param.hpp>

#include <joinable/bucket/compression/no_reduction.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/step.hpp>

namespace {

using namespace joinable_tests;
using joinable::DType;
using joinable::PeriodicAverage;

std::uint64_t inputs_of(int rank) {
    return 11 - static_cast<std::uint64_t>(rank * 3 % 7);
}
bool skips(int rank, std::uint64_t round) {
    return rank == 1 && round == 2;
}
/// How a rank steps: of values that are apart, and nowhere linear in the round.
double stepped(double value, int rank, std::uint64_t round) {
    return 0.75 * value + static_cast<double>((rank + 1) * (rank + 2)) +
           static_cast<double>(round * round) / 8;
}

/// The value of all ranks after a guard, by a serial run, which averages as the papers say.
double serial(
    int ranks,
    std::uint64_t start,
    std::uint64_t period,
    bool are_skipped = true,
    std::uint64_t rounds = 11
) {
    std::vector<double> values(static_cast<std::size_t>(ranks), 1.0);
    std::vector<double> steps(values.size());
    auto const average = [&] {
        double total = 0;
        double sum = 0;
        for (std::size_t r = 0; r < values.size(); ++r) {
            total += steps[r];
            sum += steps[r] * values[r];
        }
        if (total > 0) {
            values.assign(values.size(), sum / total);
            steps.assign(steps.size(), 0);
        }
    };
    for (std::uint64_t round = 1; round <= rounds; ++round) {
        for (int rank = 0; rank < ranks; ++rank) {
            auto const r = static_cast<std::size_t>(rank);
            if (round <= inputs_of(rank) && !(are_skipped && skips(rank, round))) {
                values[r] = stepped(values[r], rank, round);
                steps[r] += 1;
            }
        }
        if (round > start && (round - start) % period == 0) {
            average();
        }
    }
    average();
    return values.front();
}

TEST_CASE("ranks that step apart have the average of their values, by how often each stepped") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        for (auto const& [start, period] : {std::pair{0U, 1U}, {0U, 3U}, {2U, 4U}, {0U, 20U}}) {
            auto params = make_params<double>({5, 700, 1}, comm.rank() == 0 ? 1.0 : -7.0);
            PeriodicAverage average{
                comm, params, {.start = start, .period = period, .bucket_bytes = 4000}
            };
            CHECK(params[1].value[699] == 1.0); // rank 0's
            joinable::Join guard{joinable::participants(average)};
            for (std::uint64_t round = 1; round <= inputs_of(comm.rank()); ++round) {
                if (skips(comm.rank(), round)) {
                    average.skip();
                    continue;
                }
                for (Param<double>& param : params) {
                    for (double& value : param.value) {
                        value = stepped(value, comm.rank(), round);
                    }
                }
                average.step();
            }
            guard.finish();
            double const expected = serial(comm.size(), start, period);
            for (Param<double> const& param : params) {
                for (double const value : param.value) {
                    CHECK(value == doctest::Approx(expected).epsilon(1e-12));
                }
            }
            CHECK(average.rounds() == 11);
        }
    });
}

TEST_CASE("without a guard every period-th step averages") {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        auto params = make_params<float>({3}, 0.0F);
        PeriodicAverage average{comm, params, {.period = 2}};
        for (float const expected : {1.0F, 0.0F}) {
            params[0].value.assign(3, static_cast<float>(comm.rank() + 1));
            average.step();
            float const mean = static_cast<float>(comm.size() + 1) / 2;
            float const own = static_cast<float>(comm.rank() + 1);
            CHECK(params[0].value[2] == doctest::Approx(expected == 1.0F ? own : mean));
        }
    });
}

TEST_CASE("what an average cannot be beside is refused in a sentence, and differences are named") {
    over_ranks({2, 3}, [](RankCommunicator& comm) {
        auto params = make_params<float>({3});
        PeriodicAverage average{comm, params};
        joinable::DistributedDataParallel ddp{comm, params};
        CHECK_THROWS_WITH_AS(
            static_cast<void>(joinable::Join{joinable::participants(average, ddp)}),
            doctest::Contains("average"),
            joinable::ContractViolation
        );
        CHECK_THROWS_WITH_AS(
            (PeriodicAverage{comm, params, {.period = comm.rank() == 0 ? 2U : 3U}}),
            doctest::Contains("options differ: PeriodicAverage::period"),
            joinable::Mismatch
        );
        CHECK_THROWS_WITH_AS(
            (PeriodicAverage{comm, params, {.period = 0}}),
            doctest::Contains("period is 0"),
            joinable::ContractViolation
        );
    });
}

TEST_CASE("a Step beside an average runs on active ranks only") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        auto params = make_params<double>({5}, 1.0);
        PeriodicAverage average{comm, params, {.period = 3}};
        std::uint64_t round = 0;
        joinable::Step step{comm, [&] {
                                for (double& value : params[0].value) {
                                    value = stepped(value, comm.rank(), round);
                                }
                            }};
        joinable::Join guard{joinable::participants(step, average)};
        for (round = 1; round <= inputs_of(comm.rank()); ++round) {
            step.step();
            average.step();
        }
        guard.finish();
        CHECK(
            params[0].value[4] == doctest::Approx(serial(comm.size(), 0, 3, false)).epsilon(1e-12)
        );
    });
}

TEST_CASE("a rank that throws between averages is PeerFailed on all others") {
    over_ranks({2, 3, 4}, [](RankCommunicator& comm) {
        auto params = make_params<float>({300});
        PeriodicAverage average{comm, params, {.period = 2}};
        bool const throws = comm.rank() == 1;
        try {
            joinable::Join guard{joinable::participants(average)};
            for (int round = 0; round < 5; ++round) {
                if (throws && round == 3) {
                    throw std::runtime_error{"the engine failed"};
                }
                average.step();
            }
            guard.finish();
            FAIL_CHECK("the guard ended as if nothing had happened");
        } catch (joinable::PeerFailed const& error) {
            CHECK(!throws);
            CHECK(error.rank() == 1);
        } catch (std::runtime_error const&) {
            CHECK(throws);
        }
    });
}

/// A training in which rounds are opened as `Way` says; the last one is that of a guard whose end policy is
/// throw_early, or stop_at_first.
enum class Way { iterate, look_ahead, inputs, stop_at_first, throw_early };

TEST_CASE(
    "values are averaged however rounds are opened: by a loop, with look-ahead, known lengths, or an early end"
) {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        for (Way const way :
             {Way::iterate, Way::look_ahead, Way::inputs, Way::stop_at_first, Way::throw_early}) {
            auto params = make_params<double>({5, 700, 1}, 1.0);
            PeriodicAverage average{comm, params, {.period = 3, .bucket_bytes = 4000}};
            auto const train = [&](std::uint64_t round) {
                for (Param<double>& param : params) {
                    for (double& value : param.value) {
                        value = stepped(value, comm.rank(), round);
                    }
                }
                average.step();
            };
            std::vector<std::uint64_t> rounds(inputs_of(comm.rank()));
            std::iota(rounds.begin(), rounds.end(), std::uint64_t{1});
            joinable::JoinOptions options;
            if (way == Way::stop_at_first) {
                options.end_policy = joinable::EndPolicy::stop_at_first;
            } else if (way == Way::throw_early) {
                options.end_policy = joinable::EndPolicy::throw_early;
            } else if (way == Way::inputs) {
                options.inputs = rounds.size();
            }
            std::uint64_t shortest = 11;
            for (int rank = 0; rank < comm.size(); ++rank) {
                shortest = std::min(shortest, inputs_of(rank));
            }
            bool const is_uneven = shortest != 11;
            bool has_thrown_early = false;
            try {
                joinable::Join guard{joinable::participants(average), options};
                if (way == Way::look_ahead) {
                    for (std::uint64_t const round : guard.iterate(joinable::look_ahead, rounds)) {
                        train(round);
                    }
                } else if (way == Way::inputs) {
                    for (std::uint64_t const round : rounds) {
                        train(round);
                    }
                } else {
                    for (std::uint64_t const round : guard.iterate(rounds)) {
                        train(round);
                    }
                }
                guard.finish();
            } catch (joinable::EarlyTermination const&) {
                has_thrown_early = true;
            }
            CHECK(has_thrown_early == (way == Way::throw_early && is_uneven));
            bool const ends_early = way == Way::stop_at_first || way == Way::throw_early;
            std::uint64_t const expected_rounds = ends_early ? shortest : 11;
            CHECK(average.rounds() == expected_rounds);
            if (has_thrown_early) {
                average.average(); // no post hook has run
            }
            double const expected = serial(comm.size(), 0, 3, false, expected_rounds);
            for (Param<double> const& param : params) {
                CHECK(param.value.back() == doctest::Approx(expected).epsilon(1e-12));
            }
        }
    });
}

TEST_CASE("accumulating rounds count towards a period, but have no weight") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        auto params = make_params<double>({5}, 1.0);
        PeriodicAverage average{comm, params, {.period = 4}};
        joinable::DistributedDataParallel ddp{
            comm,
            params,
            joinable::DataParallelOptions{.sync_at_end = false},
            joinable::NoReduction{}
        };
        // Rank r has 2 + 2 * (r % 3) micro-batches. It steps after each second one by both gradients.
        auto const inputs = [](int rank) { return 2 + 2 * (rank % 3); };
        auto const gradient = [](double value, int rank, int batch) {
            return 0.125 * value - rank * rank + batch;
        };
        joinable::Join guard{joinable::participants(ddp, average)};
        for (int batch = 0; batch < inputs(comm.rank()); ++batch) {
            bool const syncs = batch % 2 == 1;
            ddp.forward([] {}, {.will_sync = syncs});
            ddp.backward([&](auto ready) {
                for (std::size_t k = 0; k < 5; ++k) {
                    params[0].g(k) += gradient(params[0].value[k], comm.rank(), batch);
                }
                ready(0);
            });
            if (!syncs) {
                average.skip();
                continue;
            }
            for (std::size_t k = 0; k < 5; ++k) {
                params[0].value[k] -= 0.5 * params[0].g(k);
                params[0].g(k) = 0;
            }
            average.step();
        }
        guard.finish();

        std::vector<double> values(static_cast<std::size_t>(comm.size()), 1.0);
        std::vector<double> steps(values.size());
        auto const add_up = [&] {
            double sum = 0;
            double total = 0;
            for (std::size_t r = 0; r < values.size(); ++r) {
                sum += steps[r] * values[r];
                total += steps[r];
            }
            values.assign(values.size(), total > 0 ? sum / total : values[0]);
            steps.assign(steps.size(), 0);
        };
        for (int step = 0; step < 3; ++step) {
            for (int rank = 0; rank < comm.size(); ++rank) {
                auto const r = static_cast<std::size_t>(rank);
                if (2 * step < inputs(rank)) {
                    double const both = gradient(values[r], rank, 2 * step) +
                                        gradient(values[r], rank, 2 * step + 1);
                    values[r] -= 0.5 * both;
                    steps[r] += 1;
                }
            }
            if (step == 1 && comm.size() > 1) {
                add_up();
            }
        }
        add_up();
        CHECK(params[0].value[4] == doctest::Approx(values[0]).epsilon(1e-12));
    });
}

TEST_CASE("a step counts also where its round fails, and average() averages it") {
    over_ranks({2, 3, 4}, [](RankCommunicator& comm) {
        auto params = make_params<double>({3}, 0.0);
        PeriodicAverage average{comm, params, {.period = 5}};
        std::uint64_t const own = comm.rank() == 1 ? 1 : 2;
        try {
            joinable::Join guard{joinable::participants(average)};
            for (std::uint64_t round = 1; round <= 2; ++round) {
                if (round > own) {
                    throw std::runtime_error{"the engine failed"
                    }; // between rounds: the others can go on
                }
                for (double& value : params[0].value) {
                    value += static_cast<double>(comm.rank() + 1);
                }
                average.step();
            }
            guard.finish();
        } catch (std::exception const&) {
            CHECK(average.rounds() == 1);
        }
        average.average();
        double sum = 0;
        double steps = 0;
        for (int rank = 0; rank < comm.size(); ++rank) {
            double const of_rank = rank == 1 ? 1 : 2;
            steps += of_rank;
            sum += of_rank * of_rank * (rank + 1); // its steps, by its value
        }
        CHECK(params[0].value[2] == doctest::Approx(sum / steps).epsilon(1e-12));
    });
}

TEST_CASE(
    "frozen values are rank 0's, a rank that has not stepped adds nothing, and integers are refused"
) {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        auto params = make_params<float>({3, 4}, static_cast<float>(comm.rank() + 1));
        params[0].requires_grad = false;
        PeriodicAverage average{comm, params, {.period = 1}};
        CHECK(params[0].value[2] == 1.0F);
        CHECK(params[1].value[3] == 1.0F);
        bool const steps = comm.rank() == 0;
        params[0].value.assign(3, static_cast<float>(comm.rank()));
        params[1].value.assign(4, steps ? 6.0F : std::numeric_limits<float>::quiet_NaN());
        steps ? average.step() : average.skip();
        CHECK(params[0].value[0] == static_cast<float>(comm.rank())); // each rank's own
        CHECK(params[1].value[0] == 6.0F);

        auto counters = make_params<std::int64_t>({2});
        CHECK_THROWS_WITH_AS(
            (PeriodicAverage{comm, counters}),
            doctest::Contains("is of i64: values are averaged"),
            joinable::ContractViolation
        );
    });
}

TEST_CASE("values of 16 bits whose gradients are f32 are averaged in their own dtype") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        for (DType const dtype : {DType::f16, DType::bf16}) {
            std::vector<WideParam> params;
            params.push_back(wide_param<WideParam>(dtype, DType::f32, 5));
            params.push_back(wide_param<WideParam>(DType::f32, DType::f32, 3));
            PeriodicAverage average{comm, params, {.period = 1}};
            for (WideParam const& param :
                 params) { // weights of 1 / ranks, and sums, that 16 bits hold
                write(param.value.view(), Numbers(param.value.view().numel(), 3.0 * comm.size()));
            }
            comm.rank() == 0 ? average.step() : average.skip();
            CHECK(read(params[0].value.view()) == Numbers(5, 3.0 * comm.size()));
            for (WideParam const& param : params) {
                double const own = comm.size() * (comm.rank() + 1);
                write(param.value.view(), Numbers(param.value.view().numel(), own));
            }
            average.step();
            double const mean = comm.size() * (comm.size() + 1) / 2.0;
            for (WideParam const& param : params) {
                Numbers const values = read(param.value.view());
                CHECK(values == Numbers(values.size(), mean));
            }
        }
    });
}

TEST_CASE("a parameter that is unfrozen after an average was made is refused, not left out of it") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        double const mean = static_cast<double>(comm.size() + 1) / 2;
        double const own = static_cast<double>(comm.rank() + 1);
        auto params = make_params<double>({2, 3}, 0.0);
        params[0].requires_grad = false;
        PeriodicAverage average{comm, params, {.period = 1}};
        try {
            joinable::Join guard{joinable::participants(average)};
            params[1].value.assign(3, own);
            average.step();
            CHECK(params[1].value[2] == doctest::Approx(mean));
            params[0].requires_grad = true;
            params[1].value.assign(3, 2 * own);
            average.step();
            FAIL_CHECK("a parameter was left out");
        } catch (joinable::ContractViolation const& error) {
            CHECK(
                std::string{error.what()} ==
                "parameter 0 requires a gradient now, but did not when the PeriodicAverage was made, so it would "
                "not be averaged; make the PeriodicAverage after unfreezing"
            );
        }
        average.average();
        CHECK(params[1].value[2] == doctest::Approx(2 * mean));
        PeriodicAverage again{comm, params, {.period = 1}};
        for (Param<double>& param : params) {
            param.value.assign(param.value.size(), 3 * own);
        }
        again.step();
        CHECK(params[0].value[1] == doctest::Approx(3 * mean));
        CHECK(params[1].value[2] == doctest::Approx(3 * mean));
    });
}

TEST_CASE("a model that one rank alone has changed since is refused there, and the others hear why"
) {
    for (bool const is_guarded : {true, false}) {
        for (bool const is_resized : {true, false}) {
            CAPTURE(is_guarded);
            CAPTURE(is_resized);
            over_ranks({2, 3, 4, 8}, [&](RankCommunicator& comm) {
                int const culprit = comm.size() - 1;
                auto params = make_params<double>({2, 3}, 0.0);
                params[0].requires_grad = false;
                std::string const what =
                    is_resized ? "parameter 1 is f64 (7) now, but was f64 (3) when the "
                                 "PeriodicAverage was made"
                               : "parameter 0 requires a gradient now";
                try { // others may hear it before their constructor returns
                    PeriodicAverage average{comm, params, {.period = 1}};
                    if (comm.rank() == culprit) {
                        is_resized ? params[1].value.resize(7)
                                   : void(params[0].requires_grad = true);
                    }
                    joinable::Join guard{joinable::participants(average), {.enable = is_guarded}};
                    average.step();
                    guard.finish();
                    FAIL_CHECK("a parameter was left out");
                } catch (joinable::ContractViolation const& error) {
                    CHECK(comm.rank() == culprit);
                    CHECK(std::string{error.what()}.starts_with(what));
                } catch (joinable::PeerFailed const& error) {
                    CHECK(error.rank() == culprit);
                    CAPTURE(std::string{error.what()});
                    CHECK(std::string{error.what()}.find(what) != std::string::npos);
                }
                if (is_guarded) { // it was between rounds
                    auto others = make_params<double>({3}, 2.0 + comm.rank());
                    static_cast<void>(PeriodicAverage{comm, others});
                    CHECK(others[0].value[2] == 2.0);
                }
            });
        }
    }
}

TEST_CASE("where average() cannot average the values of one rank, the others hear why") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        int const culprit = comm.size() - 1;
        auto params = make_params<double>({2, 3}, 1.0);
        PeriodicAverage average{comm, params, {.period = 4}};
        average.step();
        auto const run = [&] {
            comm.barrier(); // else others may hear it before their constructor returns
            average.average();
        };
        if (comm.rank() == culprit) {
            params[1].value.resize(7);
            CHECK_THROWS_AS(run(), joinable::ContractViolation);
        } else {
            auto const error = thrown_by<joinable::PeerFailed>(run);
            CHECK(error.rank() == culprit);
            std::string const text = error.what();
            CHECK(text.find("parameter 1 is f64 (7) now, but was f64 (3)") != std::string::npos);
        }
    });
}

TEST_CASE(
    "a rank that has stepped nothing refuses other values before those of any rank are averaged"
) {
    enum class Where { outside, on_a_joined_rank, at_the_end };
    for (Where const where : {Where::outside, Where::on_a_joined_rank, Where::at_the_end}) {
        CAPTURE(static_cast<int>(where));
        over_ranks({2, 3, 4, 8}, [&](RankCommunicator& comm) {
            bool const is_culprit = comm.rank() == comm.size() - 1;
            std::string const what =
                "parameter 1 is f64 (7) now, but was f64 (3) when the "
                "PeriodicAverage was made; make the PeriodicAverage after resizing";
            auto params = make_params<double>({2, 3}, 0.0);
            PeriodicAverage average{comm, params, {.period = 2}};
            params[1].value.assign(3, comm.rank() + 1.0);
            bool const is_guarded = where != Where::outside;
            auto const train = [&] {
                joinable::Join guard{joinable::participants(average), {.enable = is_guarded}};
                is_culprit ? average.skip() : average.step();
                if (is_culprit) {
                    params[1].value.resize(7);
                } else if (where == Where::on_a_joined_rank) {
                    average.step();
                }
                guard.finish();
            };
            auto const run = [&] {
                comm.barrier(); // else others may hear it before their constructor returns
                train();
                average.average();
            };
            if (is_culprit) {
                auto const error = thrown_by<joinable::ContractViolation>(run);
                CHECK(std::string{error.what()} == what);
            } else {
                auto const error = thrown_by<joinable::PeerFailed>(run);
                CHECK(error.rank() == comm.size() - 1);
                std::string const text = error.what();
                CAPTURE(text);
                CHECK(text.find(what) != std::string::npos);
                CHECK(params[1].value == std::vector<double>(3, comm.rank() + 1.0));
            }
        });
    }
}

TEST_CASE(
    "a guard that is not enabled averages in turn, evaluations do not count, and average() does the rest"
) {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        auto params = make_params<double>({2}, 0.0);
        PeriodicAverage average{comm, params, {.period = 2}};
        {
            joinable::Join guard{joinable::participants(average), {.enable = false}};
            for (int round = 1; round <= 3; ++round) {
                params[0].value.assign(2, static_cast<double>((comm.rank() + 1) * round));
                average.step();
            }
            guard.finish();
        }
        double const mean = static_cast<double>(comm.size() + 1) / 2;
        CHECK(params[0].value[0] == static_cast<double>(3 * (comm.rank() + 1)));
        average.average();
        CHECK(params[0].value[1] == doctest::Approx(3 * mean));
        joinable::Join guard{joinable::participants(average)};
        guard.next(true, {.phase = joinable::Phase::evaluate});
        CHECK(average.rounds() == 3);
        CHECK_THROWS_WITH_AS(
            average.average(),
            doctest::Contains("PeriodicAverage::average()"),
            joinable::ContractViolation
        );
    });
}

} // namespace
