// SPDX-License-Identifier: BSL-1.0
// A process that dies or stops between two collectives of a pass: all others end with an error that names it.
#include <joinable/participant/shadowed.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <span>
#include <thread>
#include <vector>

#include <doctest/doctest.h>
#include <support/linear_model.hpp>
#include <support/process_ranks.hpp>
#include <support/shared.hpp>
#include <support/volume.hpp>

#include <joinable/communicator/collectives.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/participant/data_parallel.hpp>

namespace {

using namespace joinable_tests;
using namespace std::chrono_literals;
using joinable::ProcessCommunicator;

/// Two collectives in each pass; `between` comes between them. Rank 0 has one input, the others have three.
template <class Between>
void train(ProcessCommunicator& comm, Between const& between) {
    auto hidden = joinable::shadowed(comm);
    auto params = make_params<double>({1});
    joinable::DistributedDataParallel ddp{comm, params};
    ddp.attach_collectives(hidden);
    joinable::Join guard{joinable::participants(ddp)};
    for (std::size_t input = 0; input < (comm.rank() == 0 ? 1U : 3U); ++input) {
        auto const pass = [&](bool is_backward) {
            double number = 1;
            joinable::all_reduce(hidden, std::span{&number, 1}).wait();
            between(hidden, input, is_backward);
            joinable::all_reduce(hidden, std::span{&number, 1}).wait();
        };
        ddp.forward([&] { pass(false); });
        ddp.backward([&](auto ready) {
            pass(true);
            add_gradient(params[0], 1.0);
            ready(0);
        });
    }
    guard.finish();
}

TEST_CASE(
    "a process that is killed or stopped between two collectives of a pass is named by all others"
) {
    for (bool const is_killed : {true, false}) {
        for (int const world : groups_of_participants({2, 3, 4, 8})) {
            for (std::size_t const round : {std::size_t{0}, std::size_t{1}, std::size_t{2}}) {
                for (bool const in_backward : {false, true}) {
                    CAPTURE(is_killed);
                    CAPTURE(world);
                    CAPTURE(round);
                    CAPTURE(in_backward);
                    int const culprit = world - 1;
                    Shared<std::atomic<int>> const named;
                    auto const hear = [&](std::vector<int> const& ranks) {
                        *named += std::find(ranks.begin(), ranks.end(), culprit) != ranks.end();
                    };
                    bool const is_last_active = world == 2 && round > 0;
                    if (!is_killed && is_last_active) {
                        continue; // only ranks that have joined wait for it, as long as a guard does
                    }
                    auto const body = [&](ProcessCommunicator& comm) {
                        auto const between = [&](auto& hidden, std::size_t input, bool backward) {
                            if (input != round || backward != in_backward) {
                                return;
                            }
                            if (comm.rank() != culprit) {
                                hidden.set_deadline(is_killed ? 60s : 200ms);
                                return;
                            }
                            while (!is_killed && *named < world - 1) { // it computes too long
                                std::this_thread::sleep_for(1ms);
                            }
                            std::raise(SIGKILL);
                        };
                        try {
                            train(comm, between);
                        } catch (joinable::PeerFailed const& error) {
                            hear(error.ranks());
                        } catch (joinable::TimedOut const& error) {
                            hear(error.ranks());
                        }
                    };
                    CHECK_THROWS_AS(run_process_ranks({world}, body), joinable::PeerFailed);
                    CHECK(*named == world - 1);
                }
            }
        }
    }
}

} // namespace
