// SPDX-License-Identifier: BSL-1.0
// The steps of many ranks on a virtual clock: how long they take by the formulas, what ports do to collectives
// that run at once, and that ranks which wait in a circle are found.
#include <simulator/simulator.hpp>

#include <cstddef>
#include <stdexcept>
#include <vector>

#include <doctest/doctest.h>
#include <simulator/plans.hpp>
#include <simulator/sharded.hpp>
#include <simulator/table.hpp>

namespace {

using namespace joinable_tests;
using enum joinable::AllReduceAlgorithm;
using joinable::all_reduce_seconds;
using joinable::AllReduceAlgorithm;
using joinable::AllReducePlan;
using joinable::MessageCosts;
using joinable::detail::MessageSchedule;

constexpr MessageCosts network{20e-6, 1e9, 0.1e-9};
/// Where combinations take longer than messages.
constexpr MessageCosts slow_cores{1e-6, 10e9, 1e-9};

double
simulated(AllReducePlan const& plan, int ranks, std::size_t bytes, MessageCosts const& costs) {
    MessageSchedule const schedule = MessageSchedule::all_reduce(plan, ranks, bytes, 1);
    return Simulator<>{costs, 1}.run({&schedule}).seconds;
}

TEST_CASE("an all-reduce takes the time of its formula") {
    for (MessageCosts const& costs : {network, slow_cores}) {
        for (int const ranks : {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 30, 64, 100}) {
            // A multiple of all blocks and pieces, also of the torus with surplus ranks.
            auto const block = static_cast<std::size_t>(ranks / 2 + ranks % 2) * 64;
            std::size_t const bytes = static_cast<std::size_t>(ranks) * block;
            for (std::size_t const segment_bytes : {std::size_t{0}, bytes / 2, block / 4}) {
                for (AllReducePlan const& plan : all_plans(ranks, segment_bytes)) {
                    double const formula = all_reduce_seconds(plan, bytes, ranks, costs);
                    double const seconds = simulated(plan, ranks, bytes, costs);
                    if (plan.algorithm == double_tree) { // some ranks have nothing to do in a round
                        CHECK_MESSAGE(
                            seconds <= formula * (1 + 1e-9), text_of(plan), " over ", ranks
                        );
                        CHECK_MESSAGE(
                            seconds >= formula / 2 * (1 - 1e-9), text_of(plan), " over ", ranks
                        );
                    } else {
                        CHECK_MESSAGE(
                            seconds == doctest::Approx(formula).epsilon(1e-9),
                            text_of(plan),
                            " over ",
                            ranks
                        );
                    }
                }
            }
        }
    }
}

TEST_CASE("blocks that are not equal take at most as long as if all were as long as the longest") {
    for (int const ranks : {2, 3, 5, 7, 8, 12, 17, 60}) {
        for (std::size_t const bytes :
             {std::size_t{1}, std::size_t{59}, std::size_t{1000}, std::size_t{99'991}}) {
            for (AllReducePlan const& plan : all_plans(ranks, 0)) {
                double const seconds = simulated(plan, ranks, bytes, network);
                std::size_t const all = static_cast<std::size_t>(ranks) * 2;
                std::size_t const padded = (bytes + all - 1) / all * all * 2;
                CHECK_MESSAGE(
                    seconds <= all_reduce_seconds(plan, padded, ranks, network),
                    text_of(plan),
                    " of ",
                    bytes,
                    " over ",
                    ranks
                );
            }
        }
    }
}

TEST_CASE("two trees approach the bandwidth of a ring with the latency of a tree") {
    MessageCosts const no_combination{20e-6, 1e9, 0};
    std::size_t const bytes = 1U << 28U;
    AllReducePlan const plan{double_tree, 1U << 20U, {}};
    double const at_least = 2.0 * static_cast<double>(bytes) / no_combination.bytes_per_second;
    CHECK(simulated(plan, 1024, bytes, no_combination) < 1.25 * at_least);
    CHECK(simulated(plan, 1024, 1024, no_combination) <= 2 * 2 * 10 * no_combination.message(512));
}

TEST_CASE("collectives that run at once share the ports") {
    for (int const ranks : {2, 4, 8}) {
        std::size_t const bytes = 1U << 20U;
        for (auto const algorithm : {ring, butterfly, halving_doubling}) {
            MessageSchedule const one = MessageSchedule::all_reduce({algorithm}, ranks, bytes, 1);
            MessageSchedule const other = MessageSchedule::all_reduce({algorithm}, ranks, bytes, 1);
            MessageCosts const no_combination{20e-6, 1e9, 0};
            double const alone = Simulator<>{no_combination, 1}.run({&one}).seconds;
            double const both = Simulator<>{no_combination, 1}.run({&one, &other}).seconds;
            // Each port has twice as much to do, and nothing else takes time.
            CHECK(both == doctest::Approx(2 * alone).epsilon(1e-9));
        }
    }
    // A roll call beside a large ring waits for one message of it in each of its rounds.
    MessageSchedule const large = MessageSchedule::all_reduce({ring}, 8, 8U << 20U, 1);
    MessageSchedule const roll_call =
        MessageSchedule::all_reduce({butterfly}, 8, roll_call_bytes, 1);
    double const alone = Simulator<>{network, 1}.run({&large}).seconds;
    double const both = Simulator<>{network, 1}.run({&large, &roll_call}).seconds;
    CHECK(both >= alone);
    CHECK(
        both <= alone + 2 * 3 * network.message(roll_call_bytes) + 3 * network.message(1U << 20U)
    );
}

TEST_CASE("ranks that wait in a circle are found, as are messages that do not fit") {
    Simulator<> simulator{network, 1};
    MessageSchedule const by_ring = MessageSchedule::all_reduce({ring}, 4, 64, 1);
    MessageSchedule const by_star = MessageSchedule::all_reduce({star}, 4, 64, 1);
    MessageSchedule const of_more = MessageSchedule::all_reduce({ring}, 4, 72, 1);
    CHECK_THROWS_WITH_AS(
        simulator.run_mixed(by_star, by_ring), "4 ranks wait in a circle", std::logic_error
    );
    CHECK_THROWS_WITH_AS(
        simulator.run_mixed(of_more, by_ring),
        "a message has another length for its receiver",
        std::logic_error
    );
}

TEST_CASE("what the program prints of many ranks agrees with the formulas") {
    Table const table = make_table({100, 1000}, {roll_call_bytes, 1U << 20U}, network, 100'000);
    CHECK(table.rows.size() > 20);
    for (Table::Row const& row : table.rows) {
        CHECK(row.seconds <= row.formula * 1.01);
        CHECK(row.seconds >= row.formula / 2);
    }
    double const round = network.message(roll_call_bytes) + network.combination(roll_call_bytes);
    CHECK(roll_call_seconds(1024, network) == doctest::Approx(10 * round));
    // 2^16 ranks take part; the others hand their words over, and get the sums.
    double const back = network.message(roll_call_bytes);
    CHECK(roll_call_seconds(100'000, network) == doctest::Approx(17 * round + back));
    // The guard's bitmap of 10^5 ranks, and what those that arrive had accumulated.
    CHECK(arrival_bytes(100'000) == (1563 + 2) * 8);
    CHECK(
        arrival_seconds(1024, network) <=
        10 * (round + network.message(144) + network.combination(144))
    );
}

TEST_CASE("collectives of a sharded training take and send along a ring what their formulas say") {
    for (MessageCosts const& costs : {network, slow_cores}) {
        for (int const ranks : {1, 2, 3, 4, 8, 15, 16, 64, 100}) {
            std::size_t const bytes = static_cast<std::size_t>(ranks) * 1000;
            RingCosts const simulated = simulate_ring(ranks, bytes, costs);
            RingCosts const formula = ring_formulas(ranks, bytes, costs);
            for (auto const one :
                 {&RingCosts::all_reduce, &RingCosts::all_gather, &RingCosts::reduce_scatter}) {
                CHECK((simulated.*one).seconds == doctest::Approx((formula.*one).seconds));
                CHECK((simulated.*one).bytes == doctest::Approx((formula.*one).bytes));
            }
        }
    }
}

TEST_CASE(
    "a rank sends 2, 2 and 3 times the parameters, as ZeRO says, and prefetching hides what fits"
) {
    UnitModel const model{8, 0.01, 0.02};
    std::size_t const unit = 1U << 20U; // 1 ms, 2 ms both ways
    double const passes = 8 * 0.03;
    for (int const ranks : {1, 2, 4, 64, 256}) {
        RingCosts const ring = simulate_ring(ranks, unit, network);
        double const share = (ranks - 1.0) / ranks * 8 * static_cast<double>(unit);
        auto const round = [&](Sharding sharding, bool prefetch = false) {
            return sharded_round(sharding, model, ring, prefetch);
        };
        CHECK(round(Sharding::none).bytes == doctest::Approx(2 * share));
        CHECK(round(Sharding::gradients).bytes == doctest::Approx(2 * share));
        CHECK(round(Sharding::parameters).bytes == doctest::Approx(3 * share));
        CHECK(
            round(Sharding::optimizer).bytes == doctest::Approx(3 * share)
        ); // all ranks get averages, and values
        // The last average leaves when nothing is left to compute; the others fit.
        CHECK(round(Sharding::none).seconds == doctest::Approx(passes + ring.all_reduce.seconds));
        CHECK(
            round(Sharding::gradients).seconds ==
            doctest::Approx(passes + ring.reduce_scatter.seconds + 8 * ring.all_gather.seconds)
        );
        // The first unit of each pass waits for its values, and without prefetching each.
        ShardedRound const ahead = round(Sharding::parameters, true);
        double const first_and_last = 2 * ring.all_gather.seconds + ring.reduce_scatter.seconds;
        CHECK(ahead.seconds == doctest::Approx(passes + first_and_last));
        CHECK(ahead.exposed == doctest::Approx(first_and_last));
        // In the backward pass, those of a unit wait for the average of the unit before.
        CHECK(
            round(Sharding::parameters).seconds ==
            doctest::Approx(passes + 16 * ring.all_gather.seconds + 8 * ring.reduce_scatter.seconds)
        );
    }
}

} // namespace
