// SPDX-License-Identifier: BSL-1.0
// An expert of a group of ranks whose optimizer is dealt out over the group: the values of a Step over it.
#include <joinable/join/groups.hpp>

#include <doctest/doctest.h>
#include <support/linear_model.hpp>
#include <support/ranks.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/step.hpp>
#include <joinable/zero.hpp>

namespace {

using namespace joinable_tests;
using joinable::participants;

constexpr double rate = 0.125;
constexpr double momentum = 0.75;

TEST_CASE("a sharded optimizer steps the expert of a group, and rests while no rank of it is active"
) {
    run_ranks({4}, [](joinable::ThreadCommunicator& comm) {
        auto group = comm.split(comm.rank() / 2, comm.rank());
        for (int seed = 0; seed < 16; ++seed) {
            auto const inputs_of = [seed](int rank) {
                return (seed >> rank) % 2 + rank * seed % 4;
            };
            auto shared = make_params<double>({1}, 1.0);
            auto expert = make_params<double>({3}, 2.0);
            joinable::DistributedDataParallel of_all{comm, shared};
            joinable::DistributedDataParallel of_group{group, expert};
            joinable::ZeroRedundancyOptimizer zero{
                group, expert, joinable::Sgd{.learning_rate = rate, .momentum = momentum}
            };
            joinable::Step step{comm, [&] { shared[0].value[0] -= rate * shared[0].g(0); }};
            {
                joinable::Join guard{
                    participants(of_all, of_group, step, zero), joinable::groups_of(comm)
                };
                for (int i = 0; i < inputs_of(comm.rank()); ++i) {
                    drop_gradients(shared);
                    drop_gradients(expert);
                    of_all.forward([] {});
                    of_all.backward([&](auto ready) {
                        add_gradient(shared[0], 1.0);
                        ready(0);
                    });
                    of_group.forward([] {});
                    of_group.backward([&](auto ready) {
                        add_gradient(expert[0], 1.0 + comm.rank() + i);
                        ready(0);
                    });
                    step.step();
                    zero.step();
                }
            }
            double value = 2.0;
            double velocity = 0.0;
            int const first = comm.rank() / 2 * 2;
            for (int i = 0; i < inputs_of(first) || i < inputs_of(first + 1); ++i) {
                double sum = 0;
                for (int rank = first; rank < first + 2; ++rank) {
                    sum += i < inputs_of(rank) ? 1.0 + rank + i : 0.0;
                }
                velocity = momentum * velocity + sum / 2;
                value -= rate * velocity;
            }
            CAPTURE(seed);
            CHECK(expert[0].value[0] == doctest::Approx(value).epsilon(1e-12));
            CHECK(expert[0].value[2] == doctest::Approx(value).epsilon(1e-12));
        }
    });
}

} // namespace
