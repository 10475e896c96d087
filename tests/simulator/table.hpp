// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <joinable/communicator/algorithms/detail/message_schedule.hpp>
#include <joinable/communicator/algorithms/plan.hpp>

#include <simulator/simulator.hpp>

namespace joinable_tests {

/// What a guard's roll call sums: seven words of 64 bits, and a sequence number.
inline constexpr std::size_t roll_call_bytes = 8 * sizeof(std::uint64_t);
/// What it sums as well in a round in which ranks arrive: a bit for each rank, and two words.
[[nodiscard]] constexpr std::size_t arrival_bytes(int ranks) {
    return ((static_cast<std::size_t>(ranks) + 63) / 64 + 2) * sizeof(std::uint64_t);
}

/// What algorithms take, simulated and by their formulas.
struct Table {
    struct Row {
        joinable::AllReducePlan plan;
        int ranks;
        std::size_t bytes;
        double seconds;
        double formula;
        std::size_t messages; ///< of the rank that sends the most
    };
    std::vector<Row> rows;
};

/// How many messages all ranks send, about: what a simulation costs.
[[nodiscard]] inline double
messages_of(joinable::AllReducePlan const& plan, int ranks, std::size_t bytes) {
    using enum joinable::AllReduceAlgorithm;
    double const n = ranks;
    double const log = joinable::detail::rounded_up_log2(ranks);
    switch (plan.algorithm) {
    case star:
    case tree: return 2 * n;
    case double_tree:
        return 4 * n *
               static_cast<double>(joinable::detail::segments_of(bytes / 2, plan.segment_bytes));
    case butterfly: return n * log;
    case ring: return 2 * n * n;
    case segmented_ring: return 3 * n * n;
    case halving_doubling: return 2 * n * log;
    case torus:
    case mesh: break;
    }
    double hops = 0;
    for (int const extent : joinable::detail::rings_of(plan, ranks)) {
        hops += 2 * (extent - 1);
    }
    return n * hops;
}

/// Every algorithm for all numbers of ranks and bytes, but those that would send more than `most` messages.
[[nodiscard]] inline Table make_table(
    std::vector<int> const& all_ranks,
    std::vector<std::size_t> const& all_bytes,
    joinable::MessageCosts const& costs,
    double most
) {
    using enum joinable::AllReduceAlgorithm;
    Table table;
    for (int const ranks : all_ranks) {
        for (std::size_t const bytes : all_bytes) {
            std::size_t const block = (std::max)(bytes / 64, std::size_t{4096});
            std::vector<joinable::AllReducePlan> const plans{
                {star},
                {tree},
                {double_tree, block, {}},
                {butterfly},
                {ring},
                {segmented_ring},
                {halving_doubling},
                {torus, 0, joinable::torus_extents(ranks, 2)},
                {torus, 0, joinable::torus_extents(ranks, 3)},
                {torus},
            };
            for (joinable::AllReducePlan const& plan : plans) {
                if (messages_of(plan, ranks, bytes) > most) {
                    continue;
                }
                auto const schedule =
                    joinable::detail::MessageSchedule::all_reduce(plan, ranks, bytes, 1);
                Simulated const run = Simulator<>{costs, 1}.run({&schedule});
                table.rows.push_back(
                    {plan,
                     ranks,
                     bytes,
                     run.seconds,
                     joinable::all_reduce_seconds(plan, bytes, ranks, costs),
                     *std::max_element(run.messages.begin(), run.messages.end())}
                );
            }
        }
    }
    return table;
}

/// What an all-reduce takes by the algorithm that is chosen for it.
[[nodiscard]] inline double
chosen_seconds(std::size_t bytes, int ranks, joinable::MessageCosts const& costs) {
    auto const plan = joinable::choose_algorithm(bytes, ranks, costs);
    auto const schedule = joinable::detail::MessageSchedule::all_reduce(plan, ranks, bytes, 1);
    return Simulator<>{costs, 1}.run({&schedule}).seconds;
}
[[nodiscard]] inline double roll_call_seconds(int ranks, joinable::MessageCosts const& costs) {
    return chosen_seconds(roll_call_bytes, ranks, costs);
}
/// With the sum that follows the roll call where ranks arrive.
[[nodiscard]] inline double arrival_seconds(int ranks, joinable::MessageCosts const& costs) {
    return roll_call_seconds(ranks, costs) + chosen_seconds(arrival_bytes(ranks), ranks, costs);
}

} // namespace joinable_tests
