// SPDX-License-Identifier: BSL-1.0
#pragma once

// A step that is captured once and replayed: weights, roles and batches change from run to run.

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include <gpu/checks.hpp>
#include <gpu/measurements.hpp>
#include <gpu/operations.hpp>

#include <joinable/nccl_graphs.hpp>

namespace joinable_gpu {

/// Passes that copy two gradients from where a batch lies.
template <class Hosts>
class CopiedBatch {
public:
    explicit CopiedBatch(Rank<Hosts>& rank)
        : rank_{rank}, floats_{numbers_on_device<float>(count, 0, rank.stream)},
          halves_{numbers_on_device<joinable::Half>(count, 0, rank.stream)},
          first_{numbers_on_device<float>(count, 99, rank.stream)},
          second_{numbers_on_device<joinable::Half>(count, 99, rank.stream)} {}

    [[nodiscard]] std::vector<joinable::Buffer> gradients() const {
        return {first_.buffer(), second_.buffer()};
    }
    /// A batch whose gradients are the numbers times `factor`.
    void load(float factor) {
        copy(numbers_on_device<float>(count, factor, rank_.stream), floats_);
        copy(numbers_on_device<joinable::Half>(count, factor, rank_.stream), halves_);
    }
    template <class Ready>
    void passes(Ready const& ready) {
        ++times_captured;
        copy(floats_, first_);
        ready(0);
        expect(!fails, "no room for activations");
        copy(halves_, second_);
        ready(1);
    }
    void expect_averages(float factor, std::string const& round) {
        expect_numbers(rank_, first_, 0, factor, "the captured average of " + round);
        expect_numbers(rank_, second_, 0, factor, "the captured average of " + round);
    }

    bool fails = false;
    int times_captured = 0;

private:
    /// More than NCCL's blocks share evenly.
    static constexpr std::size_t count = 8193;

    template <class T>
    void copy(DeviceArray<T> const& from, DeviceArray<T> const& to) {
        cuda(cudaMemcpyAsync(
            to.buffer().data,
            from.buffer().data,
            from.buffer().bytes(),
            cudaMemcpyDeviceToDevice,
            rank_.stream
        ));
    }

    Rank<Hosts>& rank_;
    DeviceArray<float> floats_;
    DeviceArray<joinable::Half> halves_;
    DeviceArray<float> first_;
    DeviceArray<joinable::Half> second_;
};

/// In a guard rank r has r + 6 rounds, and every other one of them has no samples: there it replays as a shadow, as
/// it does when it has run out. Weights sum to 8, or to 0.
template <class Hosts, class Captured>
void check_roles(Rank<Hosts>& rank, CopiedBatch<Hosts>& batch, Captured& captured) {
    int const n = rank.hosts.size();
    int const me = rank.hosts.rank();
    auto const has_samples = [](int r, int round) { return round < r + 6 && (r + round) % 2 == 0; };
    auto const weight_of = [&](int r, int round) {
        int others = 0;
        int lowest = n;
        for (int other = n; other-- > 0;) {
            others += has_samples(other, round) && other != r ? 1 : 0;
            lowest = has_samples(other, round) ? other : lowest;
        }
        return !has_samples(r, round) ? 0 : r == lowest ? 8 - others : 1;
    };
    joinable::Join guard{joinable::participants(captured), joinable::control(rank.hosts)};
    for (int round = 0; round < me + 6; ++round) {
        batch.load(8 * factor_of(me, round));
        captured.step({.weight = static_cast<std::uint64_t>(weight_of(me, round))});
        float average = 0;
        for (int r = 0; r < n; ++r) {
            average += static_cast<float>(weight_of(r, round)) * factor_of(r, round);
        }
        batch.expect_averages(average, "round " + std::to_string(round) + " in a guard");
    }
    (void)guard.finish();
    if (me != n - 1) {
        batch.expect_averages(0, "a rank that has run out");
    }
}

/// The last replays, of one batch, follow each other without a wait. Returns what one of them takes.
template <class Hosts>
Times check_captured(Rank<Hosts>& rank, int replays) {
    int const n = rank.hosts.size();
    CopiedBatch<Hosts> batch{rank};
    joinable::CapturedStep captured{rank.comm, batch.gradients(), [&](auto const& ready) {
                                        batch.passes(ready);
                                    }};
    check_roles(rank, batch, captured);
    batch.fails = true; // on all ranks, between two gradients
    expect_refused<std::runtime_error>("no room", [&] { captured.step(); });
    batch.fails = false;
    check_roles(rank, batch, captured);
    int const captured_before = batch.times_captured;
    float average = 0;
    int round = 0;
    for (; round < replays / 10; ++round) {
        batch.load(static_cast<float>(n) * factor_of(rank.hosts.rank(), round));
        captured.step();
        average = 0;
        for (int r = 0; r < n; ++r) {
            average += factor_of(r, round);
        }
        batch.expect_averages(average, "round " + std::to_string(round));
    }
    Times const times = time_calls(rank, rank.stream, replays - round, [&] { captured.step(); });
    batch.expect_averages(average, "the last round");
    expect(batch.times_captured == captured_before + 1, "a step was captured more than once");
    return times;
}

} // namespace joinable_gpu
