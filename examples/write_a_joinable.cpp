// SPDX-License-Identifier: BSL-1.0
// Shows step by step how your own class takes part in a guard. The class keeps mean and deviation
// of a feature over all ranks, as a normalisation layer does.
#include <joinable/join.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <span>
#include <vector>

// Step 6 (optional): a keyword for a choice of the guard's user.
inline constexpr struct uses_sample_variance_t : joinable::keyword<uses_sample_variance_t, bool> {
    using keyword::operator=;
} uses_sample_variance{};

class FeatureStatistics {
public:
    explicit FeatureStatistics(joinable::ThreadCommunicator& comm) : comm_{comm} {}

    // Step 1: the class's own work, a collective for each batch. Without a guard a rank with fewer
    // batches leaves the others waiting.
    void observe(std::span<double const> batch) {
        // Step 2: announce the collectives of a round, before the first of them. Outside a guard
        // this does nothing.
        (void)joinable::notify_join_context(*this);
        exchange(batch);
    }

    [[nodiscard]] double count() const { return sums_[0]; }
    [[nodiscard]] double mean() const { return mean_; }
    [[nodiscard]] double deviation() const { return deviation_; }

    // Step 3: the hook. A guard requests it when it begins. It refers to the object.
    struct Hook {
        FeatureStatistics& statistics;
        bool is_sample;

        // Runs on a rank without batches in each round of the others: the same collectives in the
        // same order. One function for both is the best way to keep them the same.
        void main_hook() { statistics.exchange({}); }

        // Runs once on every rank, when all have run out, so it may communicate. With a JoinResult
        // const& as its parameter it would know the number of rounds.
        void post_hook(bool /*is_last_joiner*/) { statistics.compute(is_sample); }

        // Step 7 (optional): `using label`, `runs_before`, `runs_after` place it among other hooks
        // (see hook_order.cpp); `static bool takes_part(joinable::Round const&)` excludes rounds.
    };
    using join_keywords = joinable::keywords<uses_sample_variance_t>;
    Hook join_hook(joinable::arguments<join_keywords> const& args) {
        return {*this, args.get(uses_sample_variance, false)};
    }

    // Step 4: its communicator, and the state in which guards record that it takes part.
    joinable::ThreadCommunicator& join_communicator() { return comm_; }
    joinable::JoinState& join_state() { return state_; }

private:
    void exchange(std::span<double const> batch) {
        std::array<double, 3> sums{};
        for (double const x : batch) {
            sums[0] += 1;
            sums[1] += x;
            sums[2] += x * x;
        }
        joinable::all_reduce(comm_, sums).wait();
        for (std::size_t i = 0; i < 3; ++i) {
            sums_[i] += sums[i];
        }
    }
    void compute(bool is_sample) {
        mean_ = sums_[1] / sums_[0];
        double const squares = sums_[2] - sums_[1] * mean_;
        deviation_ = std::sqrt(squares / (sums_[0] - (is_sample ? 1 : 0)));
    }

    joinable::ThreadCommunicator& comm_;
    joinable::JoinState state_;
    std::array<double, 3> sums_{}; ///< of ones, of numbers, of their squares
    double mean_ = 0;
    double deviation_ = 0;
};

// Step 5: let the compiler say in one sentence what is missing. Without join_state(), for example:
// "Joinable: expected a member 'JoinState& join_state()'".
static_assert(joinable::models_joinable<FeatureStatistics>());

int main() {
    std::vector<double> const temperatures{
        11.2, 9.8, 14.1, 17.5, 12.0, 8.3, 15.9, 13.3, 10.4, 16.6
    };
    constexpr std::size_t ranks = 3;
    std::array<std::size_t, ranks + 1> const begins{0, 5, 6, 10}; // shards of 5, 1 and 4
    constexpr std::size_t batch_size = 2;

    std::vector<std::array<double, 3>> found(ranks);
    std::vector<joinable::JoinResult> results(ranks);
    joinable::run_threads(ranks, [&](joinable::ThreadCommunicator& comm) {
        auto const rank = static_cast<std::size_t>(comm.rank());
        auto const shard =
            std::span{temperatures}.subspan(begins[rank], begins[rank + 1] - begins[rank]);

        FeatureStatistics statistics{comm};
        joinable::Join guard{joinable::participants(statistics), uses_sample_variance = true};
        for (std::size_t begin = 0; begin < shard.size(); begin += batch_size) {
            statistics.observe(shard.subspan(begin, std::min(batch_size, shard.size() - begin)));
        }
        results[rank] = guard.finish();
        found[rank] = {statistics.count(), statistics.mean(), statistics.deviation()};
    });

    double sum = 0;
    double squares = 0;
    for (double const x : temperatures) {
        sum += x;
    }
    double const mean = sum / static_cast<double>(temperatures.size());
    for (double const x : temperatures) {
        squares += (x - mean) * (x - mean);
    }
    double const deviation = std::sqrt(squares / static_cast<double>(temperatures.size() - 1));
    for (std::size_t rank = 0; rank < ranks; ++rank) {
        std::printf(
            "rank %zu: %zu own rounds, %zu shadowed: %2.0f numbers, mean %.3f, deviation %.3f\n",
            rank,
            results[rank].own_rounds,
            results[rank].shadow_rounds,
            found[rank][0],
            found[rank][1],
            found[rank][2]
        );
    }
    std::printf(
        "in one process:                      10 numbers, mean %.3f, deviation %.3f\n",
        mean,
        deviation
    );
}

// Output:
// rank 0: 3 own rounds, 0 shadowed: 10 numbers, mean 12.910, deviation 3.094
// rank 1: 1 own rounds, 2 shadowed: 10 numbers, mean 12.910, deviation 3.094
// rank 2: 2 own rounds, 1 shadowed: 10 numbers, mean 12.910, deviation 3.094
// in one process:                      10 numbers, mean 12.910, deviation 3.094
