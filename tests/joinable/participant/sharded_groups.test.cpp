// SPDX-License-Identifier: BSL-1.0
// An expert of a group of ranks whose optimizer is dealt out over the group: the values of a Step over it. Groups of
// which a rank throws or dies.
#include <joinable/join/groups.hpp>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstddef>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <support/faults_in_groups.hpp>
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

/// The ranks of this one's group: `of` that follow each other, of which the last group may have fewer.
struct Group {
    Group(int rank, int world, int of)
        : first{rank / of * of}, end{(std::min)(first + of, world)} {}

    int first;
    int end;

    [[nodiscard]] int size() const { return end - first; }
};

/// Adds a number to all gradients, each of which is ready then.
template <class Model, class Params>
void run_pass(Model& model, Params& params, double number) {
    model.forward([] {});
    model.backward([&](auto ready) {
        for (std::size_t p = 0; p < params.size(); ++p) {
            add_gradient(params[p], number);
            ready(p);
        }
    });
}

TEST_CASE("a sharded optimizer steps the expert of a group, and rests while no rank of it is active"
) {
    auto const check = [](auto& comm, bool has_all) {
        for (int const of : {2, 3}) {
            Group const ranks{comm.rank(), comm.size(), of};
            auto group = comm.split(ranks.first, comm.rank());
            for (int seed = 0; seed < 16; seed += has_all && of == 2 ? 1 : 5) {
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
                        run_pass(of_all, shared, 1.0);
                        run_pass(of_group, expert, 1.0 + comm.rank() + i);
                        step.step();
                        zero.rule().learning_rate = rate_of(epoch, i);
                        zero.step();
                    }
                }
                double value = 2.0;
                double velocity = 0.0;
                for (int epoch = 0; epoch < 2; ++epoch) {
                    for (int i = 0;; ++i) {
                        double sum = 0;
                        for (int rank = ranks.first; rank < ranks.end; ++rank) {
                            sum += i < inputs_of(rank) ? 1.0 + rank + i : 0.0;
                        }
                        if (sum == 0) {
                            break; // no rank of the group is active
                        }
                        velocity = momentum * velocity + sum / ranks.size();
                        value -= rate_of(epoch, i) * velocity;
                    }
                }
                CAPTURE(seed);
                CAPTURE(of);
                CHECK(expert[0].value[0] == doctest::Approx(value).epsilon(1e-12));
                CHECK(expert[0].value[2] == doctest::Approx(value).epsilon(1e-12));
            }
        }
    };
    run_participants({1, 2, 3, 4, 8}, [&](auto& comm) { check(comm, comm.size() == 4); });
    run_process_ranks({1, 2, 3, 4, 8}, [&](auto& comm) { check(comm, false); });
}

TEST_CASE("ranks of a group step by the settings of its lowest active rank") {
    run_participants(
        {3, 4, 8},
        [](joinable::ThreadCommunicator& comm) { // a group of all would compare them
            Group const ranks{comm.rank(), comm.size(), 2 + comm.size() / 8};
            auto group = comm.split(ranks.first, comm.rank());
            auto shared = make_params<double>({1}, 1.0);
            auto expert = make_params<double>({4, 4}, 2.0);
            joinable::DistributedDataParallel of_all{comm, shared};
            joinable::DistributedDataParallel of_group{group, expert};
            joinable::ZeroRedundancyOptimizer zero{
                group, expert, joinable::Sgd{.learning_rate = rate, .momentum = momentum}
            };
            joinable::Step step{comm, [] {}};
            joinable::Join guard{
                participants(of_all, of_group, step, zero), joinable::groups_of(comm)
            };
            run_pass(of_all, shared, 1.0);
            run_pass(of_group, expert, 1.0);
            step.step();
            zero.rule().learning_rate = 0.5 + comm.rank(); // 0.5 and 1.5, 2.5 and 3.5
            zero.step();
            guard.finish();
            double const expected = 2.0 - (0.5 + ranks.first);
            CHECK(expert[0].value[0] == expected);
            CHECK(expert[1].value[3] == expected);
        }
    );
}

TEST_CASE("a model that deals its state and gradients out may be an expert, and steps by itself") {
    auto const check = [](auto& comm) {
        Group const ranks{comm.rank(), comm.size(), 2 + comm.size() / 8};
        auto group = comm.split(ranks.first, comm.rank());
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
            run_pass(of_all, shared, 1.0);
            run_pass(of_group, expert, 1.0);
            of_group.step();
            step.step();
        }
        guard.finish();
        double batches = 0; // of the group, of which each counts as one of its ranks
        for (int rank = ranks.first; rank < ranks.end; ++rank) {
            batches += 1 + rank;
        }
        double const expected = 2.0 - rate * batches / ranks.size();
        CHECK(expert[0].value[1] == doctest::Approx(expected).epsilon(1e-12));
    };
    run_participants({1, 2, 3, 4, 8}, check);
    run_process_ranks({1, 2, 3, 4, 8}, check);
}

enum class Point { between_rounds, in_pass_of_all, in_pass_of_group, in_step_of_group };
constexpr Point all_points[] = {
    Point::between_rounds, Point::in_pass_of_all, Point::in_pass_of_group, Point::in_step_of_group
};

/// Rank r has r + 1 batches. The culprit calls fail() at a point of its last one, when lower ranks have joined.
template <class Comm>
void train_until(Comm& comm, Comm& group, Point point, int culprit, std::function<void()> fail) {
    bool is_last = false;
    auto const at = [&](Point here) {
        if (is_last && here == point) {
            fail();
        }
    };
    auto shared = make_params<double>({1}, 1.0);
    auto expert = make_params<double>({2, 2, 2, 2}, 2.0); // each rank of a group owns some
    joinable::DistributedDataParallel of_all{comm, shared};
    joinable::DistributedDataParallel of_group{group, expert};
    joinable::ZeroRedundancyOptimizer zero{group, expert, CallingRule{[&] {
                                               at(Point::in_step_of_group);
                                           }}};
    joinable::Step step{comm, [] {}};
    joinable::Join guard{participants(of_all, of_group, step, zero), joinable::groups_of(comm)};
    for (int i = 0; i <= comm.rank(); ++i) {
        is_last = comm.rank() == culprit && i == culprit;
        at(Point::between_rounds);
        of_all.forward([] {});
        of_all.backward([&](auto ready) {
            at(Point::in_pass_of_all);
            add_gradient(shared[0], 1.0);
            ready(0);
        });
        of_group.forward([] {});
        of_group.backward([&](auto ready) {
            for (std::size_t p = expert.size(); p-- > 0;) {
                add_gradient(expert[p], 1.0);
                ready(p);
                at(Point::in_pass_of_group);
            }
        });
        step.step();
        zero.step();
    }
    guard.finish();
}

TEST_CASE("a rank that throws at any point of groups whose optimizer is dealt out ends all ranks") {
    at_all(all_points, [](int world, Point point, int culprit) {
        auto const check = [&](auto& outer) {
            // The control communicator and the group have no abort in common.
            auto comm = outer.split(0, outer.rank());
            auto group = outer.split(outer.rank() / ((world + 1) / 2), outer.rank());
            auto const run = [&] {
                train_until(comm, group, point, culprit, [] {
                    throw std::runtime_error{"disk on fire"};
                });
            };
            if (comm.rank() == culprit) {
                CHECK_THROWS_WITH_AS(run(), "disk on fire", std::runtime_error);
            } else {
                auto const error = thrown_by<joinable::PeerFailed>(run);
                int const first =
                    error.is_renumbered() ? comm.rank() - group.rank() : 0; // a group's numbers
                CHECK(first + error.rank() == culprit);
                bool const has_text =
                    point != Point::between_rounds; // nothing catches it in the guard
                CHECK(
                    (std::string{error.what()}.find("disk on fire") != std::string::npos) ==
                    has_text
                );
            }
            bool const stays_usable = point == Point::between_rounds;
            CHECK(comm.is_aborted() == !stays_usable);
            CHECK(group.is_aborted() == !stays_usable);
            if (stays_usable) {
                comm.barrier();
                group.barrier();
            }
        };
        run_participants({world}, check);
        if (world == 3 || world == 8) {
            run_process_ranks({world}, check);
        }
    });
}

TEST_CASE("a rank that dies at any point ends the other ranks of all groups") {
    at_all(all_points, [](int world, Point point, int culprit) {
        Shared<std::atomic<int>> told;
        auto const body = [&](joinable::ProcessCommunicator& comm) {
            auto group = comm.split(comm.rank() / ((world + 1) / 2), comm.rank());
            auto const run = [&] {
                train_until(comm, group, point, culprit, [] { std::raise(SIGKILL); });
            };
            static_cast<void>(thrown_by<joinable::PeerFailed>(run));
            CHECK(comm.is_aborted());
            CHECK(comm.abort_reason().value().ranks == std::vector{culprit});
            CHECK(group.is_aborted());
            ++*told;
        };
        CHECK_THROWS_AS(run_process_ranks({world}, body), joinable::PeerFailed);
        CHECK(*told == world - 1);
    });
}

} // namespace
