// SPDX-License-Identifier: BSL-1.0
// Evaluates a classifier exactly on shards of different lengths. For comparison it prints the
// results when shards are trimmed or padded to one length, or when the ranks' accuracies are
// averaged.
#include <joinable/join.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <random>
#include <span>
#include <vector>

constexpr int ranks = 4;
constexpr std::size_t batch_size = 32;

struct Point {
    double x = 0;
    double y = 0;
    bool is_inside = false; ///< the truth: whether the point lies in the unit circle
};

/// Shards as files often are: of different lengths, each with points of one region only.
std::vector<std::vector<Point>> make_shards() {
    std::mt19937 random{1};
    auto const between = [&](double low, double high) {
        return low + (high - low) * (static_cast<double>(random()) / 0x1p32);
    };
    std::array<std::size_t, ranks> const lengths{400, 270, 230, 103};
    std::vector<std::vector<Point>> shards(ranks);
    for (std::size_t rank = 0; rank < ranks; ++rank) {
        double const reach = 0.8 + 0.2 * static_cast<double>(rank);
        for (std::size_t i = 0; i < lengths[rank]; ++i) {
            double const x = between(-reach, reach);
            double const y = between(-reach, reach);
            shards[rank].push_back({x, y, x * x + y * y < 1});
        }
    }
    return shards;
}

/// The classifier: a diamond instead of the circle.
bool is_right(Point const& point) {
    return (std::abs(point.x) + std::abs(point.y) < 1.2) == point.is_inside;
}

struct Tally {
    std::uint64_t right = 0;
    std::uint64_t seen = 0;

    void add(std::span<Point const> points) {
        for (Point const& point : points) {
            right += is_right(point) ? 1U : 0U;
            ++seen;
        }
    }
    [[nodiscard]] double percent() const {
        return 100.0 * static_cast<double>(right) / static_cast<double>(seen);
    }
};

/// Evaluates this rank's shard together with the others, one batch per round. After every round
/// every rank has the accuracy so far, also ranks that have run out.
std::vector<Tally> evaluate(joinable::ThreadCommunicator& comm, std::span<Point const> shard) {
    std::vector<Tally> so_far{{}};
    auto const add_batch = [&](std::span<Point const> batch) {
        Tally tally;
        tally.add(batch);
        std::array<std::uint64_t, 2> sums{tally.right, tally.seen};
        joinable::all_reduce(comm, sums).wait();
        so_far.push_back({so_far.back().right + sums[0], so_far.back().seen + sums[1]});
    };
    joinable::Action count{comm, add_batch, [&] { add_batch({}); }}; // a joined rank adds nothing
    joinable::Join guard{joinable::participants(count)};
    for (std::size_t begin = 0; begin < shard.size(); begin += batch_size) {
        count(shard.subspan(begin, std::min(batch_size, shard.size() - begin)));
    }
    guard.finish();
    return so_far;
}

/// All shards cut to `length`, or padded with their own first points, in one process.
Tally with_length(std::vector<std::vector<Point>> const& shards, std::size_t length) {
    Tally tally;
    for (std::vector<Point> const& shard : shards) {
        for (std::size_t i = 0; i < length; ++i) {
            tally.add({&shard[i % shard.size()], 1});
        }
    }
    return tally;
}

int main() {
    auto const shards = make_shards();
    std::vector<std::vector<Tally>> found(ranks);
    joinable::run_threads(ranks, [&](joinable::ThreadCommunicator& comm) {
        auto const rank = static_cast<std::size_t>(comm.rank());
        found[rank] = evaluate(comm, shards[rank]);
    });

    Tally serial;
    double mean = 0;
    std::size_t shortest = shards[0].size();
    std::size_t longest = 0;
    for (std::vector<Point> const& shard : shards) {
        Tally own;
        own.add(shard);
        serial.add(shard);
        mean += own.percent() / ranks;
        shortest = std::min(shortest, shard.size());
        longest = std::max(longest, shard.size());
    }
    auto const print = [](char const* what, Tally const& tally) {
        std::printf(
            "%-28s %4zu points %7.2f %% right\n", what, std::size_t{tally.seen}, tally.percent()
        );
    };
    print("in one process", serial);
    for (std::size_t rank = 0; rank < ranks; ++rank) {
        print("found by a rank, with Join", found[rank].back());
    }
    print("after 5 rounds", found[0][5]);
    print("trimmed to the shortest", with_length(shards, shortest));
    print("padded to the longest", with_length(shards, longest));
    std::printf(
        "%-28s %4zu points %7.2f %% right\n",
        "mean of the ranks' own",
        std::size_t{serial.seen},
        mean
    );
}

// Output:
// in one process               1003 points   90.83 % right
// found by a rank, with Join   1003 points   90.83 % right
// found by a rank, with Join   1003 points   90.83 % right
// found by a rank, with Join   1003 points   90.83 % right
// found by a rank, with Join   1003 points   90.83 % right
// after 5 rounds                583 points   90.57 % right
// trimmed to the shortest       412 points   91.99 % right
// padded to the longest        1600 points   91.06 % right
// mean of the ranks' own       1003 points   91.13 % right
