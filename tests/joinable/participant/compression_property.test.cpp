// SPDX-License-Identifier: BSL-1.0
// Trainings drawn from seeds whose gradients travel compressed: whatever the shards, windows, weights, skipped batches
// and unused parameters, all averages that were delivered and all that ranks keep are the sum of the serial training's
// averages, which is computed in double. In half of them a rank's gradients are infinite or NaN now and then: all ranks
// deliver that, and keep what they kept. In half the scale of the loss changes. JOINABLE_TEST_SEEDS="first count" runs
// others.
#include <joinable/compression.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <sstream>
#include <string>
#include <utility>

#include <doctest/doctest.h>
#include <support/draw.hpp>
#include <support/drawn/rank.hpp>
#include <support/ranks.hpp>
#include <support/volume.hpp>

namespace {

using namespace joinable_tests;

/// What the property needs: numbers of which rounding takes little, and windows that begin without gradients, because an
/// average that stays in a gradient counts again.
drawn::Training with_clean_windows(drawn::Training training) {
    for (drawn::Parameter& parameter : training.parameters) {
        if (parameter.is_trained) {
            parameter.dtype = joinable::DType::f64;
        }
    }
    for (drawn::Epoch& epoch : training.epochs) {
        epoch.leftover = drawn::Leftover::discarded;
        bool begins = true;
        for (drawn::RoundPlan& round : epoch.rounds) {
            round.resets_late = false;
            if (begins) {
                round.reset = drawn::Reset::zero;
            }
            for (drawn::Batch& batch :
                 round.batches) { // buckets of f64 fill earlier than those that were drawn
                batch.fails = batch.fails == drawn::Fails::in_backward ? drawn::Fails::in_forward
                                                                       : batch.fails;
            }
            begins = round.evaluates ? begins : round.will_sync;
        }
    }
    return training;
}

/// `make` makes a reduction for each rank, because none is copied.
template <class Make>
std::string check(
    std::uint64_t seed,
    drawn::Training const& training,
    drawn::Disturbances const& disturbances,
    Make const& make
) {
    try {
        drawn::Training copy = training;
        drawn::SerialTraining const serial{copy, false};
        if (!serial.is_refused()) {
            run_ranks({training.world}, [&](joinable::ThreadCommunicator& comm) {
                drawn::DrawnRank{comm, training, serial, make(), disturbances}.run();
            });
        }
    } catch (std::exception const& error) {
        return joinable::detail::concat("seed ", seed, ", ", make().name, ": ", error.what());
    }
    return {};
}

TEST_CASE(
    "in any training what compressed rounds deliver, and what ranks keep, is the sum of all averages"
) {
    std::uint64_t first = 0;
    std::uint64_t count = under_sanitizer ? 10 : 60;
    if (char const* const seeds = std::getenv("JOINABLE_TEST_SEEDS")) {
        std::istringstream{seeds} >> first >> count;
    }
    for (std::uint64_t seed = first; count > 0; ++seed) {
        drawn::Training const any = drawn::DrawTraining{seed, false}();
        if (any.model != drawn::Model::averages && any.model != drawn::Model::step &&
            any.model != drawn::Model::zero) {
            continue;
        }
        --count;
        drawn::Training const training = with_clean_windows(any);
        Draw draw{seed};
        auto const start = draw.below(4);
        bool const warm = draw.one_in(2);
        auto const kind = draw.below(4);
        drawn::Disturbances const disturbances{seed, draw.one_in(2), draw.one_in(2)};
        std::string failed;
        switch (kind) {
        case 0:
            failed =
                check(seed, training, disturbances, [] { return joinable::TopK{.density = 0.3}; });
            break;
        case 1:
            failed =
                check(seed, training, disturbances, [] { return joinable::Int8Compression{}; });
            break;
        case 2:
            failed = check(seed, training, disturbances, [&] {
                return joinable::PowerSgd{
                    .rank = 1,
                    .start_iteration = start,
                    .min_compression_rate = 1,
                    .warm_start = warm
                };
            });
            break;
        default:
            failed = check(seed, training, disturbances, [] {
                return joinable::CastTo<joinable::DType::f64>{};
            });
        }
        CHECK_MESSAGE(failed.empty(), failed);
    }
}

} // namespace
