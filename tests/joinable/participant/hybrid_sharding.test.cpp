// SPDX-License-Identifier: BSL-1.0
// Hybrid sharding: gradients are averaged over all ranks, and the ranks of a group share the optimizer's state. The
// oracles: the whole optimizer on every rank, bit for bit; a serial run in double.
#include <joinable/participant/sharded/zero_redundancy_optimizer.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <csignal>
#include <cstddef>
#include <exception>
#include <functional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <support/alike.hpp>
#include <support/embedding.hpp>
#include <support/faults_in_groups.hpp>
#include <support/folder.hpp>
#include <support/gathered_param.hpp>
#include <support/linear_model.hpp>
#include <support/numbers.hpp>
#include <support/process_ranks.hpp>
#include <support/ranks.hpp>
#include <support/sharded_training.hpp>
#include <support/shared.hpp>
#include <support/thrown_by.hpp>
#include <support/whole_optimizer.hpp>

#include <joinable/checkpoint.hpp>
#include <joinable/communicator/collectives.hpp>
#include <joinable/join/groups.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/optimizer/before_step.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/step.hpp>

namespace {

using namespace joinable_tests;
using joinable::ContractViolation;
using joinable::groups_of;
using joinable::Mismatch;
using joinable::Partition;
using joinable::ZeroOptions;
using joinable::ZeroRedundancyOptimizer;

/// The group of a rank: `of` ranks that follow each other, the last group perhaps fewer.
template <class Comm>
Comm node_of(Comm& comm, int of) {
    return comm.split(comm.rank() / of, comm.rank());
}

template <class Run>
void over_threads_and_processes(Run const& run) {
    run_participants({1, 2, 3, 4, 8}, run);
    run_process_ranks({1, 2, 3, 4, 8}, run);
}

TEST_CASE("groups that share the state train as the whole optimizer does, bit for bit") {
    ZeroOptions const options[] = {
        {},
        {.bucket_cap_bytes = 64},
        {.partition = Partition::flat, .bucket_cap_bytes = 64},
    };
    over_threads_and_processes([&](auto& comm) {
        std::size_t turn = 0;
        for (int const of : {1, 2, 3}) {
            auto node = node_of(comm, of);
            for (Inputs const& inputs : inputs_of) {
                std::size_t rules = turn++;
                for_each_rule([&](auto const& rule) {
                    if (rules++ % 4 != 0) { // one of the four, in turn
                        return;
                    }
                    Model const model{.is_large = turn % 6 == 0};
                    auto const whole = train_whole(comm, model, inputs, rule);
                    auto const make_hybrid = [&](auto& params) {
                        return ZeroRedundancyOptimizer{comm, node, params, rule, options[turn % 3]};
                    };
                    auto const hybrid = train(comm, model, inputs, make_hybrid, groups_of(comm));
                    CHECK(are_alike(hybrid, whole));
                });
            }
        }
    });
}

TEST_CASE("two groups of two train as one process does, for all numbers of batches up to 3") {
    auto const check = [](auto& comm, int seed_step) {
        auto node = node_of(comm, 2);
        for (int seed = 0; seed < 256; seed += seed_step) {
            auto const inputs = [seed](int rank) { return (seed >> (2 * rank)) % 4; };
            auto const rate = [](int round) { return 0.5 / (1 + round); };
            auto params = make_params<double>({3, 1}, 2.0); // one for each rank of a group
            DistributedDataParallel ddp{comm, params};
            ZeroRedundancyOptimizer zero{
                comm, node, params, Sgd{.learning_rate = 9.0, .momentum = 0.75}
            };
            {
                Join guard{participants(ddp, zero), groups_of(comm)};
                for (int round = 0; round < inputs(comm.rank()); ++round) {
                    drop_gradients(params);
                    ddp.forward([] {});
                    ddp.backward([&](auto ready) {
                        for (std::size_t p : {0U, 1U}) {
                            add_gradient(params[p], 1.0 + comm.rank() + 2 * round);
                            ready(p);
                        }
                    });
                    zero.rule().learning_rate = rate(round); // joined ranks and groups hear it
                    zero.step();
                }
                guard.finish();
            }
            double value = 2.0;
            double velocity = 0.0;
            for (int round = 0; round < 3; ++round) {
                double sum = 0;
                for (int rank = 0; rank < 4; ++rank) {
                    sum += round < inputs(rank) ? 1.0 + rank + 2 * round : 0.0;
                }
                if (sum != 0) {
                    velocity = 0.75 * velocity + sum / 4;
                    value -= rate(round) * velocity;
                }
            }
            CAPTURE(seed);
            CHECK(params[0].value[2] == doctest::Approx(value).epsilon(1e-12));
            CHECK(params[1].value[0] == doctest::Approx(value).epsilon(1e-12));
        }
    };
    run_participants({4}, [&](auto& comm) { check(comm, 1); });
    run_process_ranks({4}, [&](auto& comm) { check(comm, 7); });
}

TEST_CASE("a rank has the state of its part of the group, and each group all of it") {
    over_threads_and_processes([](auto& comm) {
        auto node = node_of(comm, 2);
        auto params = make_params<double>({8, 8}, 1.0);
        ZeroRedundancyOptimizer zero{comm, node, params, Sgd{.momentum = 0.5}};
        CHECK(zero.state_bytes() == 16 * sizeof(double) / static_cast<std::size_t>(node.size()));
        CHECK(zero.owner_of(1) == node.size() - 1);
    });
}

TEST_CASE("owners in groups send the rows that they have stepped") {
    over_threads_and_processes([](auto& comm) {
        auto node = node_of(comm, 2);
        std::array<Embedding, 2> words{Embedding{true}, Embedding{true}};
        std::vector<Embedding*> const list{&words[0], &words[1]};
        DistributedDataParallel ddp{comm, list};
        ZeroRedundancyOptimizer zero{comm, node, list, Sgd{.learning_rate = 1.0}};
        auto const before = words[1].value;
        {
            Join guard{participants(ddp, zero), groups_of(comm)};
            for (int round = 0; round <= comm.rank(); ++round) { // a rank less in each round
                ddp.forward([] {});
                ddp.backward([&](auto ready) {
                    for (std::size_t e : {0U, 1U}) {
                        words[e].indices = {round % 3, 5};
                        words[e].rows.assign(2 * Embedding::width, 1.0F);
                        ready(e);
                    }
                });
                zero.step();
            }
            guard.finish();
        }
        double sums[6] = {};
        for (int rank = 0; rank < comm.size(); ++rank) {
            for (int round = 0; round <= rank; ++round) {
                sums[round % 3] += 1.0 / comm.size();
                sums[5] += 1.0 / comm.size();
            }
        }
        for (std::size_t row = 0; row < 6; ++row) {
            double const trained = static_cast<double>(before[row * Embedding::width]) - sums[row];
            for (Embedding const& embedding : words) {
                double const value = static_cast<double>(embedding.value[row * Embedding::width]);
                CHECK(value == doctest::Approx(trained).epsilon(1e-5));
            }
        }
    });
}

TEST_CASE("before_step sums over the group, which has all gradients, and all ranks skip together") {
    over_threads_and_processes([](auto& comm) {
        auto node = node_of(comm, 2);
        auto params = make_params<double>({2, 3}, 1.0);
        DistributedDataParallel ddp{comm, params};
        double norm = 0;
        double largest = 0;
        int calls = 0;
        ZeroOptions options;
        options.before_step = [&](joinable::ShardGradients const& gradients) {
            double squares[2] = {};
            gradients.sum_squares(squares);
            norm = std::sqrt(squares[0] + squares[1]);
            largest = gradients.max(comm.rank());
            return ++calls != 2;
        };
        ZeroRedundancyOptimizer zero{comm, node, params, Sgd{.learning_rate = 1.0}, options};
        Join guard{participants(ddp, zero), groups_of(comm)};
        for (int round = 0; round < 2 + comm.rank() % 2; ++round) {
            drop_gradients(params);
            ddp.forward([] {});
            ddp.backward([&](auto ready) {
                for (std::size_t p : {0U, 1U}) {
                    add_gradient(params[p], 3.0);
                    ready(p);
                }
            });
            zero.step();
        }
        guard.finish();
        double const share =
            static_cast<double>(comm.size() / 2) / comm.size(); // in the last round
        double const last = comm.size() == 1 ? 1.0 : share;
        CHECK(largest == std::min(2, comm.size()) - 1); // of the first group
        CHECK(norm == doctest::Approx(3.0 * last * std::sqrt(5.0)).epsilon(1e-12));
        double const steps = comm.size() == 1 ? 1.0 : 1.0 + share; // the second one was skipped
        CHECK(params[1].value[2] == doctest::Approx(1.0 - 3.0 * steps).epsilon(1e-12));
    });
}

/// A step of a training outside guards: the gradients of all elements are `number`.
template <class Params, class Optimizer>
void step_by(Params& params, Optimizer& zero, double number) {
    drop_gradients(params);
    for (auto& param : params) {
        add_gradient(param, number);
    }
    zero.step();
}

TEST_CASE("groups of different sizes clip to the same bits") {
    over_threads_and_processes([](auto& comm) {
        auto node = node_of(comm, 2); // of 3 ranks the last one is alone
        auto params = make_params<double>({1001, 63}, 1.0);
        joinable::ClipNorm clip{1.0};
        ZeroRedundancyOptimizer zero{
            comm,
            node,
            params,
            Sgd{.learning_rate = 1.0},
            {.partition = Partition::flat, .before_step = std::ref(clip)}
        };
        for (int round = 0; round < 20; ++round) {
            drop_gradients(params);
            for (auto& param : params) {
                add_gradient(param, 0.0);
                for (std::size_t i = 0; i < param.value.size(); ++i) {
                    param.g(i) = std::sin(static_cast<double>(i * 7 + 3) * (round + 1));
                }
            }
            zero.step();
        }
        std::vector<double> all(params[0].value.size() * static_cast<std::size_t>(comm.size()));
        joinable::all_gather(comm, std::span{std::as_const(params[0].value)}, std::span{all})
            .wait();
        for (std::size_t i = 0; i < all.size(); ++i) {
            CHECK_MESSAGE(all[i] == params[0].value[i % params[0].value.size()], i);
        }
    });
}

TEST_CASE("values live in the buckets in which they travel in the group") {
    over_threads_and_processes([](auto& comm) {
        for (Partition const partition : {Partition::by_parameters, Partition::flat}) {
            auto node = node_of(comm, 2);
            Model const model{.dtype = DType::f64};
            auto params = gathered(make(model));
            Sgd const rule{.learning_rate = 0.25};
            ZeroRedundancyOptimizer zero{
                comm,
                node,
                params,
                rule,
                {.partition = partition, .bucket_cap_bytes = 64, .parameters_as_bucket_view = true}
            };
            auto const first = values_of(make(model));
            for (int round = 0; round < 2; ++round) {
                for (std::size_t i = params.size(); i-- > 0;) {
                    params[i].own->need_grad();
                    write(params[i].own->grad, Numbers(params[i].own->grad.numel(), 0.5));
                }
                zero.step();
            }
            for (std::size_t i = 0; i < params.size(); ++i) {
                Numbers const values = read(params[i].value);
                for (std::size_t k = 0; k < values.size(); ++k) {
                    CHECK(values[k] == first[i][k] - 0.25);
                }
            }
        }
    });
}

TEST_CASE("state is gathered in each group, and loaded if the groups give the same") {
    over_threads_and_processes([](auto& comm) {
        auto node = node_of(comm, 2);
        auto params = make_params<double>({4, 1, 2}, 1.0);
        Sgd const rule{.learning_rate = 1.0, .momentum = 0.5};
        ZeroRedundancyOptimizer zero{comm, node, params, rule};
        step_by(params, zero, 1.0);
        zero.consolidate(0);
        joinable::OptimizerState<Sgd> state;
        if (node.rank() == 0) {
            state = zero.state();
            REQUIRE(state.parameters.size() == 3);
            CHECK(state.parameters[2].tensors[0].elements.size() == 2 * sizeof(double));
        }
        step_by(params, zero, 1.0); // 1 - 1 - 1.5
        zero.load(state, 0);
        step_by(params, zero, 1.0); // by the velocity of the first step again: - 1.5
        CHECK(params[0].value[3] == -3.0);
        if (node.rank() == 0 && comm.rank() != 0) {
            state.parameters[1].tensors[0].elements[7] ^= std::byte{1};
        }
        if (node.size() == comm.size()) {
            return; // one group has nothing to differ from
        }
        auto const error = thrown_by<Mismatch>([&] { zero.load(state, 0); });
        CHECK(
            std::string{error.what()}.find("state that a group of shards loads") !=
            std::string::npos
        );
        step_by(params, zero, 1.0); // nothing was changed
        CHECK(params[0].value[3] == -3.0 - 1.75);
    });
}

/// Settings that ranks cannot compare.
struct Silent {
    double rate = 0.5;

    [[nodiscard]] static std::span<std::string_view const> state_names() { return {}; }
    template <class T>
    void update(joinable::UpdateRange<T> const& range) const {
        for (std::size_t i = 0; i < range.size; ++i) {
            range.values[i] -= static_cast<T>(rate) * range.gradients[i];
        }
    }
};

TEST_CASE("groups that load settings which no rank can compare take those of rank 0") {
    over_threads_and_processes([](auto& comm) {
        auto node = node_of(comm, 2);
        auto params = make_params<double>({4, 1}, 1.0);
        ZeroRedundancyOptimizer zero{comm, node, params, Silent{}};
        zero.consolidate();
        joinable::OptimizerState<Silent> state;
        if (node.rank() == 0) {
            state = zero.state();
            state.rules[0].rate = 2.0 + comm.rank();
        }
        zero.load(state);
        step_by(params, zero, 1.0);
        CHECK(params[0].value[3] == -1.0);
        CHECK(params[1].value[0] == -1.0);
    });
}

TEST_CASE("a rank that a smaller group lacks gives no state") {
    run_participants({3, 8}, [](auto& comm) {
        auto node = node_of(comm, comm.size() - 1);
        auto params = make_params<double>({4, 1}, 1.0);
        ZeroRedundancyOptimizer zero{comm, node, params, Sgd{}};
        joinable::OptimizerState<Sgd> const state;
        if (node.size() == 1) {
            CHECK_THROWS_WITH_AS(
                zero.load(state, 1),
                "expected a from_rank from 0 to 0, but got 1",
                ContractViolation
            );
        } else {
            static_cast<void>(thrown_by<joinable::PeerFailed>([&] { zero.load(state, 1); }));
        }
    });
}

TEST_CASE("refresh() keeps the state of each group") {
    over_threads_and_processes([](auto& comm) {
        auto node = node_of(comm, 2);
        auto params = make_params<double>({4, 1, 2}, 1.0);
        params[1].requires_grad = false;
        ZeroRedundancyOptimizer zero{
            comm, node, params, Sgd{.learning_rate = 1.0, .momentum = 0.5}
        };
        step_by(params, zero, 1.0);
        drop_gradients(params);
        params[1].requires_grad = true;
        zero.refresh();
        step_by(params, zero, 1.0);
        CHECK(params[0].value[3] == 1.0 - 1.0 - 1.5);
        CHECK(params[1].value[0] == 0.0);
        CHECK(params[2].value[1] == 1.0 - 1.0 - 1.5);
    });
}

TEST_CASE("a checkpoint of groups has the state once, and any number of ranks and groups reads it"
) {
    Folder const folder;
    std::string const file = folder.file("hybrid.safetensors");
    auto const train_to = [](auto& comm, auto& zero, auto& params, auto& ddp, int rounds) {
        Join guard{participants(ddp, zero), groups_of(comm)};
        for (int round = 0; round < rounds; ++round) {
            drop_gradients(params);
            ddp.forward([] {});
            ddp.backward([&](auto ready) {
                for (std::size_t p = 0; p < params.size(); ++p) {
                    add_gradient(params[p], 1.0);
                    ready(p);
                }
            });
            zero.step();
        }
        guard.finish();
    };
    Sgd const rule{.learning_rate = 1.0, .momentum = 0.5};
    auto const write = [&](auto& comm) {
        auto node = node_of(comm, 2);
        auto params = make_params<double>({4, 1, 2}, 1.0);
        DistributedDataParallel ddp{comm, params};
        ZeroRedundancyOptimizer zero{comm, node, params, rule};
        train_to(comm, zero, params, ddp, 2);
        joinable::Checkpoint{participants(ddp, zero), file}.write();
    };
    auto const read = [&](auto& comm) {
        for (int const of : {1, 2, 3, comm.size()}) {
            auto node = node_of(comm, of);
            auto params = make_params<double>({4, 1, 2}, 9.0);
            DistributedDataParallel ddp{comm, params};
            ZeroRedundancyOptimizer zero{comm, node, params, Sgd{.momentum = 0.5}};
            joinable::Checkpoint{participants(ddp, zero), file}.read();
            train_to(comm, zero, params, ddp, 1);
            CHECK(params[0].value[3] == 1.0 - 1.0 - 1.5 - 1.75);
            CHECK(params[2].value[1] == 1.0 - 1.0 - 1.5 - 1.75);
        }
    };
    for (int const writers : {1, 3, 4, 8}) {
        run_participants({writers}, write);
        run_participants({1, 2, 3, 4, 8}, read);
    }
    run_process_ranks({4}, write);
    run_process_ranks({3, 8}, read);
}

TEST_CASE("a checkpoint in a guard has what all groups trained") {
    Folder const folder;
    std::string const file = folder.file("guard.safetensors");
    auto const check = [&](auto& comm) {
        auto node = node_of(comm, 2);
        Sgd const rule{.learning_rate = 1.0, .momentum = 0.5};
        auto params = make_params<double>({4, 1, 2}, 0.0);
        {
            DistributedDataParallel ddp{comm, params};
            ZeroRedundancyOptimizer zero{comm, node, params, rule};
            joinable::Checkpoint save{participants(ddp, zero), file, {.every = 2}};
            Join guard{participants(ddp, zero, save), groups_of(comm)};
            for (int round = 0; round < (comm.rank() == comm.size() - 1 ? 3 : 1); ++round) {
                ddp.forward([] {});
                drop_gradients(params);
                ddp.backward([&](auto ready) {
                    for (std::size_t p = 0; p < params.size(); ++p) {
                        add_gradient(params[p], comm.size());
                        ready(p);
                    }
                });
                zero.step();
                save.step();
            }
            guard.finish();
        }
        auto again = make_params<double>({4, 1, 2}, 9.0);
        ZeroRedundancyOptimizer zero{comm, again, rule};
        joinable::Checkpoint{zero, file}.read();
        double const first = -comm.size();
        double const velocity = 0.5 * comm.size() + 1.0; // the last rank alone
        CHECK(again[0].value[3] == first - velocity);
        CHECK(again[2].value[1] == first - velocity);
        step_by(again, zero, 0.0);
        CHECK(again[1].value[0] == first - 1.5 * velocity);
        comm.barrier();
    };
    over_threads_and_processes(check);
}

enum class Point { between_rounds, in_pass, in_step, after_step };
constexpr Point all_points[] = {
    Point::between_rounds, Point::in_pass, Point::in_step, Point::after_step
};

/// Rank r has r + 1 batches. The culprit calls fail() at a point of its last one, when lower ranks have joined.
template <class Comm>
void train_until(Comm& comm, Comm& node, Point point, int culprit, std::function<void()> fail) {
    bool is_last = false;
    auto const at = [&](Point here) {
        if (is_last && here == point) {
            fail();
        }
    };
    auto params = make_params<double>({2, 2, 2, 2}, 2.0); // each rank of a group owns some
    DistributedDataParallel ddp{comm, params};
    ZeroRedundancyOptimizer zero{
        comm, node, params, CallingRule{[&] { at(Point::in_step); }}, {.bucket_cap_bytes = 16}
    };
    Join guard{participants(ddp, zero), groups_of(comm)};
    for (int i = 0; i <= comm.rank(); ++i) {
        is_last = comm.rank() == culprit && i == culprit;
        at(Point::between_rounds);
        ddp.forward([] {});
        ddp.backward([&](auto ready) {
            for (std::size_t p = params.size(); p-- > 0;) {
                add_gradient(params[p], 1.0);
                ready(p);
                at(Point::in_pass);
            }
        });
        zero.step();
        at(Point::after_step);
    }
    guard.finish();
}

TEST_CASE("a rank that throws at any point of hybrid sharding ends all ranks of all groups") {
    at_all(all_points, [](int world, Point point, int culprit) {
        auto const check = [&](auto& outer) {
            // The control communicator and the group have no abort in common.
            auto comm = outer.split(0, outer.rank());
            auto node = outer.split(outer.rank() / ((world + 1) / 2), outer.rank());
            auto const run = [&] {
                train_until(comm, node, point, culprit, [] {
                    throw std::runtime_error{"disk on fire"};
                });
            };
            if (comm.rank() == culprit) {
                CHECK_THROWS_WITH_AS(run(), "disk on fire", std::runtime_error);
            } else {
                auto const error = thrown_by<joinable::PeerFailed>(run);
                int const first = error.is_renumbered() ? comm.rank() - node.rank() : 0;
                CHECK(first + error.rank() == culprit);
            }
            bool const stays_usable = point == Point::between_rounds || point == Point::after_step;
            CHECK(comm.is_aborted() == !stays_usable);
            CHECK(node.is_aborted() == !stays_usable);
            if (!stays_usable) {
                CHECK(comm.abort_reason().value().ranks == std::vector{culprit});
            } else {
                comm.barrier();
                node.barrier();
            }
        };
        run_participants({world}, check);
        if (world == 3 || world == 8) {
            run_process_ranks({world}, check);
        }
    });
}

TEST_CASE("a rank that dies at any point of hybrid sharding ends the other ranks of all groups") {
    at_all(all_points, [](int world, Point point, int culprit) {
        Shared<std::atomic<int>> told;
        auto const body = [&](joinable::ProcessCommunicator& comm) {
            auto node = comm.split(comm.rank() / ((world + 1) / 2), comm.rank());
            auto const run = [&] {
                train_until(comm, node, point, culprit, [] { std::raise(SIGKILL); });
            };
            static_cast<void>(thrown_by<joinable::PeerFailed>(run));
            CHECK(comm.abort_reason().value().ranks == std::vector{culprit});
            CHECK(node.is_aborted());
            ++*told;
        };
        CHECK_THROWS_AS(run_process_ranks({world}, body), joinable::PeerFailed);
        CHECK(*told == world - 1);
    });
}

TEST_CASE("a rank that throws in a step outside guards ends all groups") {
    auto const check = [](auto& outer) {
        auto comm = outer.split(0, outer.rank());
        auto node = node_of(comm, 2);
        auto params = make_params<double>({2, 2, 2, 2}, 2.0);
        int steps = 0;
        auto const before_step = [&] {
            if (comm.rank() == 1 && ++steps == 2) { // one exchange is in flight
                throw std::runtime_error{"disk on fire"};
            }
        };
        ZeroRedundancyOptimizer zero{
            comm, node, params, CallingRule{before_step}, {.bucket_cap_bytes = 16}
        };
        std::string text;
        try {
            step_by(params, zero, 1.0);
            comm.barrier();
        } catch (std::exception const& error) {
            text = error.what();
        }
        CHECK(text.find("disk on fire") != std::string::npos);
    };
    run_participants({2, 3, 4, 8}, check);
    run_process_ranks({4}, check);
}

TEST_CASE("mistakes with groups that share the state are told in a sentence, and nothing is aborted"
) {
    run_participants({4}, [](auto& comm) {
        auto node = node_of(comm, 2);
        auto params = make_params<double>({2, 2}, 1.0);
        auto const told = [&](auto&& call, std::string const& part) {
            std::string text;
            try {
                call();
            } catch (std::exception const& error) {
                text = error.what();
            }
            CAPTURE(text);
            CHECK(text.find(part) != std::string::npos);
            CHECK_FALSE(comm.is_aborted());
            CHECK_FALSE(node.is_aborted());
            comm.barrier(); // before a rank leaves
        };
        DistributedDataParallel ddp{comm, params};
        told(
            [&] {
                ZeroRedundancyOptimizer zero{comm, node, params, Sgd{}};
                Join guard{participants(ddp, zero)};
            },
            "for groups of ranks, see groups_of()"
        );
        told(
            [&] {
                ZeroRedundancyOptimizer zero{
                    comm, node, params, Sgd{}, {.reduces_gradients = true}
                };
            },
            "ZeroOptions::reduces_gradients averages over the ranks that share the state alone"
        );
        told(
            [&] {
                auto& shards = comm.rank() == 3 ? comm : node;
                ZeroRedundancyOptimizer zero{comm, shards, params, Sgd{}};
            },
            "groups of ranks share the state"
        );
        told([&] { ZeroRedundancyOptimizer zero{node, comm, params, Sgd{}}; }, "more ranks");
        told(
            [&] {
                auto expert = comm.split(comm.rank() / 3, comm.rank()); // 3 ranks, and 1
                auto half = expert.split(expert.rank() / 2, expert.rank());
                auto& shards = expert.size() == 3 ? half : expert;
                DistributedDataParallel of_expert{expert, params};
                ZeroRedundancyOptimizer zero{expert, shards, params, Sgd{}};
                Join guard{participants(of_expert, zero), groups_of(comm)};
            },
            "groups that share a state"
        );
        told(
            [&] {
                auto own = make_params<double>({2}, 1.0);
                DistributedDataParallel of_node{node, own};
                ZeroRedundancyOptimizer zero{comm, node, params, Sgd{}};
                step_by(params, zero, 1.0);
                Join guard{participants(of_node)};
                try {
                    zero.step();
                } catch (ContractViolation const&) {
                    guard.finish();
                    throw;
                }
            },
            "is used while its communicator is in a guard"
        );
    });
}

} // namespace
