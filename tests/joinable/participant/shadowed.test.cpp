// SPDX-License-Identifier: BSL-1.0
// Models that communicate within their passes, on ranks with different numbers of inputs: equal to one rank
// with the samples of all. And every way to misuse it: a typed error, on all ranks, at once.
#include <joinable/participant/shadowed.hpp>

#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/linear_model.hpp>
#include <support/normalized_net.hpp>

#include <joinable/communicator/collectives.hpp>
#include <joinable/communicator/self.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/participant/action.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/step.hpp>

namespace {

using namespace joinable_tests;
using joinable::BufferSync;
using joinable::ContractViolation;
using joinable::DataParallelOptions;
using joinable::DistributedDataParallel;
using joinable::Join;
using joinable::Mismatch;
using joinable::participants;
using joinable::PeerFailed;
using joinable::Phase;
using joinable::ReduceOp;
using joinable::Round;
using joinable::RoundNotice;

using Hidden = joinable::ShadowedCommunicator<RankCommunicator>;
static_assert(joinable::Communicator<Hidden>);
static_assert(joinable::Aborts<Hidden> == joinable::Aborts<RankCommunicator>);
static_assert(joinable::HasDeadline<Hidden> == joinable::HasDeadline<RankCommunicator>);

// -- equal to one rank with all samples --------------------------------------------------------------

/// Which rank has no input at all, and how rounds are opened.
enum class Without { nobody, first, last };
enum class Opens { passes, iterate, look_ahead };

std::size_t inputs_of(int rank, int world, Without without) {
    if (world > 1 && ((without == Without::first && rank == 0) ||
                      (without == Without::last && rank == world - 1))) {
        return 0;
    }
    return 3 + static_cast<std::size_t>(5 * rank % 7);
}
std::size_t rounds_of(int world, Without without) {
    std::size_t most = 0;
    for (int rank = 0; rank < world; ++rank) {
        most = std::max(most, inputs_of(rank, world, without));
    }
    return most;
}
std::vector<NormalizedNet::Row> batch_of(int rank, std::size_t input) {
    std::vector<NormalizedNet::Row> samples(1 + (static_cast<std::size_t>(rank) + 2 * input) % 3);
    double phase = 1.7 * rank + 0.9 * static_cast<double>(input);
    for (auto& sample : samples) {
        for (double& x : sample) {
            x = std::sin(phase += 2.3);
        }
    }
    return samples;
}
/// Rounds of all kinds, in turns.
RoundNotice notice_of(std::size_t round, std::uint64_t samples) {
    return {
        .will_sync = round % 4 != 1,
        .phase = round % 4 == 2 ? Phase::evaluate : Phase::train,
        .weight = samples
    };
}
std::size_t uses_in(std::size_t round) {
    return round % 3 == 2 ? 2 : 1;
}
constexpr double rate = 0.05;

struct Trained {
    std::vector<double> values;
    std::vector<double> losses; ///< of all ranks, by round; where this rank is active
    std::vector<double> largest;
};

std::vector<double> values_of(NormalizedNet const& net) {
    std::vector<double> values;
    for (auto const& param : net.params) {
        values.insert(values.end(), param.value.begin(), param.value.end());
    }
    values.insert(values.end(), net.running_mean.begin(), net.running_mean.end());
    values.insert(values.end(), net.running_variance.begin(), net.running_variance.end());
    return values;
}

Trained train_serially(int world, Without without) {
    Trained trained;
    NormalizedNet net{[](auto) {}};
    double weight = 0;
    for (std::size_t round = 0; round < rounds_of(world, without); ++round) {
        std::vector<NormalizedNet::Row> samples;
        for (int rank = 0; rank < world; ++rank) {
            if (round < inputs_of(rank, world, without)) {
                auto const batch = batch_of(rank, round);
                samples.insert(samples.end(), batch.begin(), batch.end());
            }
        }
        RoundNotice const notice = notice_of(round, samples.size());
        net.updates_running = notice.phase == Phase::train;
        trained.losses.push_back(net.forward(samples, uses_in(round)));
        if (notice.phase != Phase::train) {
            continue;
        }
        net.backward([](std::size_t) {});
        weight += static_cast<double>(samples.size());
        if (notice.will_sync) {
            net.step(rate / std::exchange(weight, 0.0));
        }
    }
    trained.values = values_of(net);
    return trained;
}

Trained
train(RankCommunicator& comm, Without without, Opens opens, DataParallelOptions const& options) {
    Trained trained;
    auto hidden = joinable::shadowed(comm);
    NormalizedNet net{[&](std::span<double> sums) { joinable::all_reduce(hidden, sums).wait(); }};
    DistributedDataParallel ddp{
        comm, net.params, joinable::buffers(net.running_mean, net.running_variance), options
    };
    ddp.attach_collectives(hidden);
    joinable::Step step{comm, [&] { net.step(rate); }};
    Join guard{participants(ddp, step)};

    std::vector<std::size_t> rounds(
        inputs_of(static_cast<int>(comm.rank()), static_cast<int>(comm.size()), without)
    );
    for (std::size_t i = 0; i < rounds.size(); ++i) {
        rounds[i] = i;
    }
    auto const announce = [&](std::size_t round) {
        return notice_of(round, batch_of(static_cast<int>(comm.rank()), round).size());
    };
    auto const run = [&](std::size_t round) {
        RoundNotice const notice = announce(round);
        net.updates_running = notice.phase == Phase::train;
        double loss = 0;
        auto const pass = [&] {
            loss = net.forward(batch_of(static_cast<int>(comm.rank()), round), uses_in(round));
            if (notice.phase != Phase::train) { // a metric
                joinable::all_reduce(hidden, std::span{&loss, 1}).wait();
            }
        };
        ddp.forward(pass, opens == Opens::passes ? notice : RoundNotice{});
        if (notice.phase == Phase::train) {
            joinable::all_reduce(hidden, std::span{&loss, 1}).wait(); // between the passes
            ddp.backward([&](auto ready) { net.backward(ready); });
        }
        trained.losses.push_back(loss);
        if (notice.will_sync && notice.phase == Phase::train) {
            step.step();
        }
    };
    if (opens == Opens::passes) {
        for (std::size_t const round : rounds) {
            run(round);
        }
    } else if (opens == Opens::iterate) {
        for (std::size_t const round : guard.iterate(rounds, announce)) {
            run(round);
        }
    } else {
        for (std::size_t const round : guard.iterate(joinable::look_ahead, rounds, announce)) {
            run(round);
        }
    }
    guard.finish();
    trained.values = values_of(net);
    return trained;
}

void check_near(std::vector<double> const& values, std::vector<double> const& expected) {
    for (std::size_t i = 0; i < values.size(); ++i) {
        CAPTURE(i);
        CHECK(values[i] == doctest::Approx(expected.at(i)).epsilon(1e-10));
    }
}

TEST_CASE(
    "a net that normalises over all ranks trains on uneven inputs as one rank with all samples"
) {
    for (Without const without : {Without::nobody, Without::first, Without::last}) {
        for (Opens const opens : {Opens::passes, Opens::iterate, Opens::look_ahead}) {
            for (BufferSync const sync : {BufferSync::after_forward, BufferSync::before_forward}) {
                over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
                    CAPTURE(static_cast<int>(without));
                    CAPTURE(static_cast<int>(opens));
                    CAPTURE(static_cast<int>(sync));
                    auto const world = static_cast<int>(comm.size());
                    CAPTURE(world);
                    Trained const expected = train_serially(world, without);
                    DataParallelOptions options;
                    options.gradient_kind = joinable::GradientKind::sum;
                    options.buffer_sync = sync;
                    options.first_bucket_bytes = 1;
                    options.bucket_cap_bytes = 1;
                    Trained const trained = train(comm, without, opens, options);
                    check_near(trained.values, expected.values);
                    check_near(trained.losses, expected.losses);
                });
            }
        }
    }
}

} // namespace
