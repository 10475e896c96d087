// SPDX-License-Identifier: BSL-1.0
// Local SGD: ranks step apart, and average their values now and then.
#include <joinable/participant/periodic_average.hpp>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/linear_model.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/step.hpp>

namespace {

using namespace joinable_tests;
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
double serial(int ranks, std::uint64_t start, std::uint64_t period) {
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
    for (std::uint64_t round = 1; round <= 11; ++round) {
        for (int rank = 0; rank < ranks; ++rank) {
            auto const r = static_cast<std::size_t>(rank);
            if (round <= inputs_of(rank) && !skips(rank, round)) {
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
        joinable::Step step{comm, [] {}};
        CHECK_THROWS_WITH_AS(
            static_cast<void>(joinable::Join{joinable::participants(average, step)}),
            doctest::Contains("step without a participant"),
            joinable::ContractViolation
        );
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
