// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include <simulator/plans.hpp>

#include <joinable/algorithms.hpp>

/// What measure_costs() says of a transport, and how much longer than the fastest plan the chosen one takes. Rank 0
/// prints a line for each size. All plans run in turns; times are those of the fastest turn, which others on the machine
/// disturb least.
template <class Comm>
void print_chosen_plans(char const* name, Comm& comm) {
    using Clock = std::chrono::steady_clock;
    constexpr int turns = 31;
    joinable::MessageCosts const costs = joinable::measure_costs(comm);
    if (comm.rank() == 0) {
        std::printf(
            "%s, %d ranks: alpha %.2f us, B %.2f GB/s, C %.3f ns, both ways %.2f, overlap %.2f, uncached %.2f\n",
            name,
            comm.size(),
            costs.message_seconds * 1e6,
            costs.bytes_per_second * 1e-9,
            costs.combine_seconds * 1e9,
            costs.both_ways,
            costs.overlap,
            costs.uncached
        );
    }
    for (std::size_t const bytes :
         {std::size_t{64}, std::size_t{1} << 14U, std::size_t{1} << 20U, std::size_t{1} << 24U}) {
        std::vector<float> values(bytes / sizeof(float), 1.0F);
        std::vector<joinable::AllReducePlan> plans{
            joinable::choose_algorithm(bytes, comm.size(), costs)
        };
        for (joinable::AllReducePlan& plan : joinable_tests::all_plans(comm.size(), bytes / 8)) {
            plans.push_back(std::move(plan));
        }
        std::vector<std::unique_ptr<joinable::MessageCommunicator<Comm>>> over;
        for (joinable::AllReducePlan const& plan : plans) {
            over.push_back(std::make_unique<joinable::MessageCommunicator<Comm>>(
                comm, joinable::MessageOptions{.plan = plan}
            ));
        }
        int const repetitions = bytes <= (1U << 14U) ? 20 : bytes <= (1U << 20U) ? 3 : 1;
        std::vector<double> fastest(plans.size(), 1e9);
        for (int turn = 0; turn < turns; ++turn) {
            for (std::size_t i = 0; i < plans.size(); ++i) {
                over[i]->barrier();
                auto const begin = Clock::now();
                for (int k = 0; k < repetitions; ++k) {
                    over[i]
                        ->all_reduce(
                            {values.data(), values.size(), joinable::DType::f32},
                            joinable::ReduceOp::max
                        )
                        .wait();
                }
                over[i]->barrier();
                std::chrono::duration<double> const took = Clock::now() - begin;
                fastest[i] = (std::min)(fastest[i], took.count() / repetitions);
            }
        }
        auto const best = static_cast<std::size_t>(
            std::min_element(fastest.begin(), fastest.end()) - fastest.begin()
        );
        if (comm.rank() == 0) {
            std::printf(
                "%9zu bytes: %.1f us by %s, which is chosen, %.2f of %s\n",
                bytes,
                fastest[0] * 1e6,
                joinable_tests::text_of(plans[0]).c_str(),
                fastest[0] / fastest[best],
                joinable_tests::text_of(plans[best]).c_str()
            );
            std::fflush(stdout);
        }
    }
}
