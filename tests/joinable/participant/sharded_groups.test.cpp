// SPDX-License-Identifier: BSL-1.0
// An expert of a group of ranks whose optimizer is dealt out over the group: the values of a Step over it. Groups of
// processes of which one dies.
#include <joinable/join/groups.hpp>

#include <atomic>
#include <csignal>
#include <vector>

#include <doctest/doctest.h>
#include <support/all_reducer.hpp>
#include <support/linear_model.hpp>
#include <support/process_ranks.hpp>
#include <support/ranks.hpp>
#include <support/shared.hpp>
#include <support/thrown_by.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/step.hpp>
#include <joinable/zero.hpp>

namespace {

using namespace joinable_tests;
using joinable::participants;

constexpr double rate = 0.125;
constexpr double momentum = 0.75;

/// A schedule. Groups of other lengths are elsewhere in it when the next guard begins.
[[nodiscard]] double rate_of(int epoch, int i) {
    return rate / (1 + 2 * epoch + i);
}

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
            for (int epoch = 0; epoch < 2; ++epoch) {
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
                    zero.rule().learning_rate = rate_of(epoch, i);
                    zero.step();
                }
            }
            double value = 2.0;
            double velocity = 0.0;
            int const first = comm.rank() / 2 * 2;
            for (int epoch = 0; epoch < 2; ++epoch) {
                for (int i = 0; i < inputs_of(first) || i < inputs_of(first + 1); ++i) {
                    double sum = 0;
                    for (int rank = first; rank < first + 2; ++rank) {
                        sum += i < inputs_of(rank) ? 1.0 + rank + i : 0.0;
                    }
                    velocity = momentum * velocity + sum / 2;
                    value -= rate_of(epoch, i) * velocity;
                }
            }
            CAPTURE(seed);
            CHECK(expert[0].value[0] == doctest::Approx(value).epsilon(1e-12));
            CHECK(expert[0].value[2] == doctest::Approx(value).epsilon(1e-12));
        }
    });
}

TEST_CASE("ranks of a group step by the settings of its lowest active rank") {
    run_ranks({4}, [](joinable::ThreadCommunicator& comm) {
        auto group = comm.split(comm.rank() / 2, comm.rank());
        auto shared = make_params<double>({1}, 1.0);
        auto expert = make_params<double>({4, 4}, 2.0);
        joinable::DistributedDataParallel of_all{comm, shared};
        joinable::DistributedDataParallel of_group{group, expert};
        joinable::ZeroRedundancyOptimizer zero{
            group, expert, joinable::Sgd{.learning_rate = rate, .momentum = momentum}
        };
        joinable::Step step{comm, [] {}};
        joinable::Join guard{participants(of_all, of_group, step, zero), joinable::groups_of(comm)};
        of_all.forward([] {});
        of_all.backward([&](auto ready) {
            add_gradient(shared[0], 1.0);
            ready(0);
        });
        of_group.forward([] {});
        of_group.backward([&](auto ready) {
            for (std::size_t p = 0; p < expert.size(); ++p) {
                add_gradient(expert[p], 1.0);
                ready(p);
            }
        });
        step.step();
        zero.rule().learning_rate = 0.5 + comm.rank(); // 0.5 and 1.5, 2.5 and 3.5
        zero.step();
        guard.finish();
        double const expected = 2.0 - (0.5 + comm.rank() / 2 * 2);
        CHECK(expert[0].value[0] == expected);
        CHECK(expert[1].value[3] == expected);
    });
}

TEST_CASE("a model that deals its state and gradients out may be an expert, and steps by itself") {
    run_ranks({4}, [](joinable::ThreadCommunicator& comm) {
        auto group = comm.split(comm.rank() / 2, comm.rank());
        auto shared = make_params<double>({1}, 1.0);
        auto expert = make_params<double>({4}, 2.0);
        joinable::DistributedDataParallel of_all{comm, shared};
        joinable::ShardedDataParallel of_group{
            group,
            expert,
            joinable::Sgd{.learning_rate = rate},
            {.sharding = joinable::Sharding::gradients}
        };
        joinable::Step step{comm, [] {}};
        joinable::Join guard{participants(of_all, of_group, step), joinable::groups_of(comm)};
        for (int i = 0; i < 1 + comm.rank(); ++i) {
            drop_gradients(shared);
            drop_gradients(expert);
            of_all.forward([] {});
            of_all.backward([&](auto ready) {
                add_gradient(shared[0], 1.0);
                ready(0);
            });
            of_group.forward([] {});
            of_group.backward([&](auto ready) {
                add_gradient(expert[0], 1.0);
                ready(0);
            });
            of_group.step();
            step.step();
        }
        guard.finish();
        // The second rank of a pair has one batch more, which counts half.
        double const expected = 2.0 - rate * (1 + comm.rank() / 2 * 2 + 0.5);
        CHECK(expert[0].value[1] == expected);
    });
}

TEST_CASE("a rank that dies at any point ends the other ranks of all groups") {
    enum class Point { between_rounds, in_part_of_all, in_part_of_group };
    for (Point const point :
         {Point::between_rounds, Point::in_part_of_all, Point::in_part_of_group}) {
        for (int const culprit : {0, 1, 3}) {
            CAPTURE(static_cast<int>(point));
            CAPTURE(culprit);
            Shared<std::atomic<int>> told;
            auto const body = [&](joinable::ProcessCommunicator& comm) {
                auto group = comm.split(comm.rank() / 2, comm.rank());
                auto const die_at = [&](Point here) {
                    if (comm.rank() == culprit && here == point) {
                        std::raise(SIGKILL);
                    }
                };
                AllReducer of_all{comm};
                AllReducer of_group{group};
                of_all.before_reduction = [&](auto const&) { die_at(Point::in_part_of_all); };
                of_group.before_reduction = [&](auto const&) { die_at(Point::in_part_of_group); };
                auto const run = [&] {
                    joinable::Join guard{participants(of_all, of_group), joinable::groups_of(comm)};
                    for (int i = 0; i < 1 + comm.rank(); ++i) {
                        of_all();
                        of_group();
                        die_at(Point::between_rounds);
                    }
                };
                static_cast<void>(thrown_by<joinable::PeerFailed>(run));
                CHECK(comm.is_aborted());
                CHECK(comm.abort_reason().value().ranks == std::vector{culprit});
                CHECK(group.is_aborted());
                ++*told;
            };
            CHECK_THROWS_AS(run_process_ranks({4}, body), joinable::PeerFailed);
            CHECK(*told == 3);
        }
    }
}

} // namespace
