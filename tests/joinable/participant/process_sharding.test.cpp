// SPDX-License-Identifier: BSL-1.0
// Sharded optimizers of process ranks: how the others end when an owner is killed within a step.
#include <joinable/participant/sharded/data_parallel.hpp>
#include <joinable/participant/sharded/zero_redundancy_optimizer.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>
#include <support/gathered_param.hpp>
#include <support/linear_model.hpp>
#include <support/process_ranks.hpp>
#include <support/shared.hpp>
#include <support/time_of_death.hpp>
#include <support/volume.hpp>

#include <joinable/communicator/shared_memory/run_processes.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/participant/data_parallel.hpp>

namespace {

using namespace joinable_tests;
using namespace std::chrono_literals;
using joinable::DistributedDataParallel;
using joinable::Join;
using joinable::participants;
using joinable::ProcessCommunicator;
using joinable::ShardedDataParallel;
using joinable::ShardedOptions;
using joinable::Sharding;
using joinable::WholeParameter;
using joinable::ZeroRedundancyOptimizer;

struct Told {
    TimeOfDeath time;
    std::atomic<int> named{0}; ///< by the others, in what they throw
};

/// Its owner is killed when it steps a parameter for the nth time: what others own is on its way then.
struct Deadly {
    std::size_t index;
    std::uint64_t nth;
    Told* told;
    double rate = 0.5;

    double& settings() { return rate; }
    void step(WholeParameter const& parameter) const {
        if (parameter.index == index && parameter.step == nth) {
            told->time.happens();
            std::raise(SIGKILL);
        }
        auto const value = parameter.value.as<float>();
        auto const gradient = parameter.gradient.as<float>();
        for (std::size_t k = 0; k < parameter.value.numel(); ++k) {
            value(k) -= static_cast<float>(rate) * gradient(k);
        }
    }
};

/// Ranks of even numbers have one input, the others three.
void train(ProcessCommunicator& comm, Deadly const& deadly) {
    auto const world = static_cast<std::size_t>(comm.size());
    std::vector<CopyingParam> params;
    for (std::size_t i = 0; i < 2 * world; ++i) {
        params.emplace_back(std::size_t{3});
    }
    auto const train_in = [&](auto&& guard, auto& model, auto& optimizer) {
        for (int round = 0; round < (comm.rank() % 2 == 0 ? 1 : 3); ++round) {
            model.forward([](auto const&...) {});
            model.backward([&](auto const& ready, auto const&... use) {
                for (std::size_t i = params.size(); i-- > 0;) {
                    (static_cast<void>(use(i)), ...);
                    add_gradient(params[i], 1.0);
                    ready(i);
                }
            });
            optimizer.step();
        }
        guard.finish();
    };
    if (deadly.index % 2 == 0) {
        DistributedDataParallel ddp{comm, params};
        ZeroRedundancyOptimizer zero{comm, params, deadly, {.bucket_cap_bytes = 24}};
        train_in(Join{participants(ddp, zero)}, ddp, zero);
    } else {
        ShardedOptions const options{
            .sharding = deadly.index % 4 == 1 ? Sharding::gradients : Sharding::parameters,
            .bucket_cap_bytes = 24
        };
        ShardedDataParallel sharded{comm, params, deadly, options};
        train_in(Join{participants(sharded)}, sharded, sharded);
    }
}

TEST_CASE("an owner that is killed within a sharded step is named by all others at once") {
    for (int const world : groups_of_participants({2, 3, 4, 8})) {
        std::vector<TimeOfDeath::Clock::duration> delays;
        for (std::size_t index = 0; index < 2 * static_cast<std::size_t>(world);
             ++index) { // in turn by both classes
            // Equal parameters are dealt out in turn. Those of even ranks have joined before the third.
            int const culprit = static_cast<int>(index) % world;
            std::uint64_t const nth = 1 + index % 3;
            CAPTURE(world);
            CAPTURE(index);
            CAPTURE(nth);
            Shared<Told> told;
            auto const body = [&](ProcessCommunicator& comm) {
                try {
                    train(comm, Deadly{index, nth, &*told});
                } catch (joinable::PeerFailed const& error) {
                    told->time.is_heard();
                    told->named += error.rank() == culprit ? 1 : 0;
                }
            };
            CHECK_THROWS_WITH_AS(
                run_process_ranks({world}, body),
                joinable::detail::concat(
                    "rank ", culprit, " failed: its process was killed by signal 9"
                )
                    .c_str(),
                joinable::PeerFailed
            );
            CHECK(told->named == world - 1);
            delays.push_back(told->time.delay());
        }
        CHECK(most_of(delays) < 1s);
        CHECK(*std::max_element(delays.begin(), delays.end()) < 30s); // half of the deadline
    }
}

} // namespace
