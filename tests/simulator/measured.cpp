// SPDX-License-Identifier: BSL-1.0
// Runs all-reduces of 2 to 16 thread ranks over links that take their time by the clock, and prints what they took
// beside what the simulator says. Then it measures the costs of these links, and compares what they choose with the
// fastest of all plans. The ranks only wait most of the time, so two cores do for all of them.
//
//   measured [REPETITIONS [RANKS...]]
//
// Without RANKS it runs groups of 2, 3, 4, 6, 8, 12 and 16 beside the simulator.
//
// Exit status: 1 if a run was faster than the simulator says, if alpha or B were measured wrong by more than 20 %, or if
// the chosen plan was more than 20 % slower than the fastest. How much slower than simulated all are depends on the
// machine.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <vector>

#include <joinable/algorithms.hpp>
#include <joinable/communicator/shared_memory/run_threads.hpp>
#include <joinable/communicator/shared_memory/thread.hpp>

#include <simulator/plans.hpp>
#include <simulator/simulator.hpp>
#include <simulator/timed_links.hpp>

namespace {

using namespace joinable_tests;
using Clock = std::chrono::steady_clock;

constexpr joinable::MessageCosts costs{2e-3, 100e6, 0};
constexpr double most_loss = 1.2; ///< what a chosen plan may take, of the fastest

/// Whether alpha and B are those of the links, within 20 %.
bool are_right(joinable::MessageCosts const& found) {
    return std::abs(found.message_seconds / costs.message_seconds - 1) < 0.2 &&
           std::abs(found.bytes_per_second / costs.bytes_per_second - 1) < 0.2;
}

/// The fastest of some runs. A run begins when the last rank comes to the barrier before it, though a rank
/// may leave that barrier late.
double measure(joinable::AllReducePlan const& plan, int ranks, std::size_t count, int repetitions) {
    TimedLinks links{costs};
    double fastest = 1e9;
    std::vector<Clock::time_point> came(static_cast<std::size_t>(ranks));
    joinable::run_threads(ranks, [&](joinable::ThreadCommunicator& comm) {
        Linked linked{links, comm.rank(), comm.size()};
        joinable::MessageCommunicator over{linked, {.plan = plan}};
        std::vector<float> values(count, 1.0F);
        for (int i = 0; i < repetitions; ++i) {
            came[static_cast<std::size_t>(comm.rank())] = Clock::now();
            comm.barrier();
            over.all_reduce({values.data(), count, joinable::DType::f32}, joinable::ReduceOp::max)
                .wait();
            comm.barrier();
            if (comm.rank() == 0) {
                std::chrono::duration<double> const took =
                    Clock::now() - *std::max_element(came.begin(), came.end());
                fastest = (std::min)(fastest, took.count());
            }
            comm.barrier(); // rank 0 has read when ranks came
        }
    });
    return fastest;
}

/// What measure_costs finds: of some tries, because a machine that is busy elsewhere makes waits longer.
joinable::MessageCosts measured_costs(int ranks) {
    joinable::MessageCosts found;
    for (int attempt = 0; attempt < 5; ++attempt) {
        TimedLinks links{costs};
        joinable::run_threads(ranks, [&](joinable::ThreadCommunicator& comm) {
            Linked linked{links, comm.rank(), comm.size()};
            joinable::MessageCosts const measured = joinable::measure_costs(linked);
            if (comm.rank() == 0) {
                found = measured;
            }
        });
        if (are_right(found)) {
            break;
        }
    }
    return found;
}

/// What these costs choose, over the fastest of all plans.
double loss_of(joinable::MessageCosts const& found, int ranks, std::size_t bytes) {
    std::size_t const count = bytes / sizeof(float);
    joinable::AllReducePlan const chosen = joinable::choose_algorithm(bytes, ranks, found);
    double seconds = measure(chosen, ranks, count, 3);
    double best = seconds;
    for (std::size_t const segment : {bytes / 4, bytes / 16}) {
        for (joinable::AllReducePlan const& plan : all_plans(ranks, segment)) {
            best = (std::min)(best, measure(plan, ranks, count, 1));
        }
    }
    for (int attempt = 0; attempt < 20 && seconds > most_loss * best; ++attempt) {
        seconds = (std::min)(
            seconds, measure(chosen, ranks, count, 1)
        ); // all that others do adds to a time
    }
    std::printf(
        "%d ranks, %zu bytes: %s is chosen, which takes %.3f of the fastest\n",
        ranks,
        bytes,
        text_of(chosen).c_str(),
        seconds / best
    );
    return seconds / best;
}

} // namespace

int main(int count, char** arguments) {
    int const repetitions = count > 1 ? std::atoi(arguments[1]) : 5;
    std::vector<int> groups{2, 3, 4, 6, 8, 12, 16};
    if (count > 2) {
        groups.clear();
        std::transform(arguments + 2, arguments + count, std::back_inserter(groups), std::atoi);
    }
    std::vector<double> ratios;
    std::printf(
        "%-40s %6s %8s %10s %10s %6s\n",
        "algorithm",
        "ranks",
        "bytes",
        "measured",
        "simulated",
        "ratio"
    );
    for (int const ranks : groups) {
        for (std::size_t const bytes : {std::size_t{64}, std::size_t{1} << 18U}) {
            for (joinable::AllReducePlan const& plan : all_plans(ranks, 1U << 15U)) {
                std::size_t const elements = bytes / sizeof(float);
                auto const schedule = joinable::detail::MessageSchedule::all_reduce(
                    plan, ranks, elements, sizeof(float)
                );
                double const simulated = Simulator<>{costs, sizeof(float)}.run({&schedule}).seconds;
                double const measured = measure(plan, ranks, elements, repetitions);
                double const ratio = measured / simulated;
                std::printf(
                    "%-40s %6d %8zu %10.4f %10.4f %6.3f\n",
                    text_of(plan).c_str(),
                    ranks,
                    bytes,
                    measured,
                    simulated,
                    ratio
                );
                ratios.push_back(ratio);
            }
        }
    }
    std::sort(ratios.begin(), ratios.end());
    std::printf(
        "measured / simulated: %.3f at least, %.3f in the median, %.3f at most\n",
        ratios.front(),
        ratios[ratios.size() / 2],
        ratios.back()
    );
    bool is_good = ratios.front() >= 1;
    for (int const ranks : {2, 4, 7}) {
        joinable::MessageCosts const found = measured_costs(ranks);
        is_good = is_good && are_right(found);
        std::printf(
            "%d ranks measure alpha as %.3f and B as %.3f of the links'\n",
            ranks,
            found.message_seconds / costs.message_seconds,
            found.bytes_per_second / costs.bytes_per_second
        );
        for (std::size_t const bytes : {std::size_t{64}, std::size_t{1} << 19U}) {
            is_good = loss_of(found, ranks, bytes) <= most_loss && is_good;
        }
    }
    return is_good ? 0 : 1;
}
