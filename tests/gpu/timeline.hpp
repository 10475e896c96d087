// SPDX-License-Identifier: BSL-1.0
#pragma once

// What a guard adds to the timeline of a GPU, and to the host's time: iterations outside a guard, inside
// one, and outside again, in turn. The difference between the two outside is the spread.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include <gpu/measurements.hpp>

namespace joinable_gpu {

enum class ActivityKind : std::uint8_t { kernel, copy, memset };

/// Something that ran on the GPU, in nanoseconds of any clock.
struct Activity {
    ActivityKind kind;
    std::uint64_t start;
    std::uint64_t end;
};

/// Of several iterations.
struct TimelineSums {
    std::array<std::size_t, 3> counts{}; ///< kernels, copies, memsets
    std::uint64_t idle = 0; ///< nanoseconds between the first and the last one in which none ran

    friend bool operator==(TimelineSums const&, TimelineSums const&) = default;
};

[[nodiscard]] inline TimelineSums sum_up(std::vector<Activity> activities) {
    std::sort(activities.begin(), activities.end(), [](Activity const& a, Activity const& b) {
        return a.start < b.start;
    });
    TimelineSums sums;
    std::uint64_t busy_until = activities.empty() ? 0 : activities.front().start;
    for (Activity const& activity : activities) {
        ++sums.counts[static_cast<std::size_t>(activity.kind)];
        if (activity.start > busy_until) {
            sums.idle += activity.start - busy_until;
        }
        busy_until = (std::max)(busy_until, activity.end);
    }
    return sums;
}

/// What a guard adds to something that was measured outside, inside and outside again in each round.
class Added {
public:
    void note(double outside, double inside, double outside_again) {
        outside_.push_back(outside);
        more_.push_back(inside - (outside + outside_again) / 2);
        spread_.push_back(std::abs(outside_again - outside));
    }
    [[nodiscard]] double outside() const { return median(outside_); }
    [[nodiscard]] double more() const { return median(more_); }
    /// Nine of ten differences between two measurements outside are at most this.
    [[nodiscard]] double spread() const {
        std::vector<double> all = spread_;
        std::sort(all.begin(), all.end());
        return all[(all.size() - 1) * 9 / 10];
    }

private:
    std::vector<double> outside_;
    std::vector<double> more_;
    std::vector<double> spread_;
};

/// Rank 0 prints. `record(f)` gives the activities that f() leaves on this rank's GPU.
/// @throws std::runtime_error  a guard adds a kernel, a copy or a memset.
template <class Hosts, class Replica, class Record>
void measure_guard(Rank<Hosts>& rank, Replica& replica, int rounds, Record const& record) {
    replica.iterate(); // cuts the buckets
    auto const once = time_calls(rank, rank.stream, 2, [&] { replica.iterate(); });
    int const iterations = std::max(1, calls_for(rank, once.gpu, 6 * rounds, 60));
    auto const iterate = [&] {
        for (int i = 0; i < iterations; ++i) {
            replica.iterate();
        }
    };
    auto const in_guard = [&](auto const& f) {
        joinable::Join guard{joinable::participants(replica.ddp()), joinable::control(rank.hosts)};
        replica.iterate();
        auto const result = f();
        (void)guard.finish();
        return result;
    };
    auto const host = [&] {
        return time_calls(rank, rank.stream, iterations, [&] { replica.iterate(); }).host;
    };
    auto const timeline = [&] {
        rank.comm.synchronize();
        return sum_up(record([&] {
            rank.hosts.barrier();
            iterate();
            rank.comm.synchronize();
        }));
    };
    Added host_microseconds;
    Added idle_microseconds;
    TimelineSums outside;
    TimelineSums inside;
    auto const idle = [&](TimelineSums const& sums) {
        return 1e-3 * static_cast<double>(sums.idle) / iterations;
    };
    for (int round = -1; round < rounds; ++round) {
        double const before = host();
        double const within = in_guard(host);
        double const after = host();
        outside = timeline();
        inside = in_guard(timeline);
        TimelineSums const again = timeline();
        if (round >= 0) { // the first one warms up
            host_microseconds.note(before, within, after);
            idle_microseconds.note(idle(outside), idle(inside), idle(again));
        }
        expect(
            outside.counts[0] > 0 && outside.counts[1] > 0,
            "no kernel or no copy of an iteration was recorded"
        );
        constexpr std::array<char const*, 3> names{"kernels", "copies", "memsets"};
        for (std::size_t kind = 0; kind < names.size(); ++kind) {
            expect(
                inside.counts[kind] == outside.counts[kind],
                std::to_string(iterations) +
                    " iterations in a guard: " + std::to_string(inside.counts[kind]) + " " +
                    names[kind] + ", not " + std::to_string(outside.counts[kind]) + " as outside"
            );
        }
    }
    if (rank.hosts.rank() != 0) {
        return;
    }
    std::printf(
        "%d ranks: %d iterations outside a guard: %zu kernels, %zu copies, %zu memsets; inside: the "
        "same\n",
        rank.hosts.size(),
        iterations,
        outside.counts[0],
        outside.counts[1],
        outside.counts[2]
    );
    std::printf(
        "%-24s %10s %12s %10s  aim\n", "us per iteration", "outside", "more inside", "spread"
    );
    auto const print = [](char const* what, Added const& added, double most) {
        std::printf(
            "%-24s %10.2f %12.2f %10.2f  at most %.2f: %s\n",
            what,
            added.outside(),
            added.more(),
            added.spread(),
            most,
            verdict(added.more() <= most)
        );
    };
    print("idle gaps of the GPU", idle_microseconds, idle_microseconds.spread());
    print("the host", host_microseconds, 2);
}

} // namespace joinable_gpu
