// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>

#include <joinable/communicator/algorithms/detail/message_schedule.hpp>
#include <joinable/communicator/algorithms/plan.hpp>
#include <joinable/participant/sharded/options.hpp>

#include <simulator/simulator.hpp>

namespace joinable_tests {

/// A collective of a ring: its time, and what a rank sends in it.
struct RingCost {
    double seconds = 0;
    double bytes = 0;
};

/// The collectives of a sharded training over a unit of so many bytes. A ring's all-reduce scatters sums and then
/// gathers them, so the first half is the difference.
struct RingCosts {
    RingCost all_reduce;
    RingCost all_gather;
    RingCost reduce_scatter{
        all_reduce.seconds - all_gather.seconds, all_reduce.bytes - all_gather.bytes
    };
};

/// By the formulas: an all-gather takes N - 1 messages of an N-th.
[[nodiscard]] inline RingCosts
ring_formulas(int ranks, std::size_t bytes, joinable::MessageCosts const& costs) {
    double const hops = ranks - 1;
    double const part = static_cast<double>(bytes) / ranks;
    double const reduced =
        joinable::all_reduce_seconds({joinable::AllReduceAlgorithm::ring}, bytes, ranks, costs);
    return {{reduced, 2 * hops * part}, {hops * costs.message(part), hops * part}};
}

/// The same, simulated.
/// @pre bytes is a multiple of ranks
[[nodiscard]] inline RingCosts
simulate_ring(int ranks, std::size_t bytes, joinable::MessageCosts const& costs) {
    auto const run = [&](joinable::detail::MessageSchedule const& schedule) {
        Simulated const found = Simulator<>{costs, 1}.run({&schedule});
        std::size_t const most = *std::max_element(found.elements.begin(), found.elements.end());
        return RingCost{found.seconds, static_cast<double>(most)};
    };
    using joinable::detail::MessageSchedule;
    return {
        run(MessageSchedule::all_reduce({joinable::AllReduceAlgorithm::ring}, ranks, bytes, 1)),
        run(MessageSchedule::all_gather(ranks, bytes / static_cast<std::size_t>(ranks)))
    };
}

using joinable::Sharding;

/// A model of equal units, which all ranks compute at one speed.
struct UnitModel {
    std::size_t units = 1;
    double forward_seconds = 0;  ///< of a unit
    double backward_seconds = 0; ///< of a unit
};

struct ShardedRound {
    double seconds = 0;
    double exposed = 0; ///< of it nothing is computed for so long
    double bytes = 0;   ///< that a rank sends
};

/// A round of training, in which a rank computes while one collective at a time moves data, in the order in which the
/// pass asks for them. Averages leave as their unit's backward pass ends. Owners send values after the last average, or
/// where parameters are divided a unit's are gathered before its forward pass and again before its backward pass:
/// with `prefetch` while the unit before it is computed.
[[nodiscard]] inline ShardedRound
sharded_round(Sharding sharding, UnitModel const& model, RingCosts const& of_unit, bool prefetch) {
    ShardedRound round;
    double computed = 0;
    double network = 0;
    auto const send = [&](double from, RingCost const& cost) {
        network = (std::max)(network, from) + cost.seconds;
        round.bytes += cost.bytes;
        return network;
    };
    auto const pass = [&](double seconds, bool is_backward) {
        bool const gathers = sharding == Sharding::parameters;
        double ready = gathers ? send(computed, of_unit.all_gather) : 0;
        for (std::size_t unit = 0; unit < model.units; ++unit) {
            double const begin = (std::max)(computed, ready);
            bool const has_next = gathers && unit + 1 < model.units;
            if (has_next && prefetch) {
                ready = send(begin, of_unit.all_gather);
            }
            computed = begin + seconds;
            if (is_backward) {
                send(
                    computed,
                    sharding == Sharding::none || sharding == Sharding::optimizer
                        ? of_unit.all_reduce
                        : of_unit.reduce_scatter
                );
            }
            if (has_next && !prefetch) {
                ready = send(computed, of_unit.all_gather);
            }
        }
    };
    pass(model.forward_seconds, false);
    pass(model.backward_seconds, true);
    if (sharding == Sharding::optimizer || sharding == Sharding::gradients) {
        for (std::size_t unit = 0; unit < model.units; ++unit) {
            send(computed, of_unit.all_gather);
        }
    }
    round.seconds = (std::max)(computed, network);
    round.exposed = round.seconds - static_cast<double>(model.units) *
                                        (model.forward_seconds + model.backward_seconds);
    return round;
}

} // namespace joinable_tests
