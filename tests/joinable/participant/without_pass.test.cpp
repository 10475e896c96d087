// SPDX-License-Identifier: BSL-1.0
// Ranks that run no backward pass in a round, because they have joined, skip, or failed: what they send, and what
// their gradients are afterwards.
#include <joinable/bucket/bucket_reduction.hpp>
#include <joinable/bucket/without_pass.hpp>

#include <chrono>
#include <cstddef>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/linear_model.hpp>
#include <support/thrown_by.hpp>

#include <joinable/bucket/all_reduce.hpp>
#include <joinable/bucket/reducer.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/sharded/data_parallel.hpp>
#include <joinable/participant/sharded/zero_redundancy_optimizer.hpp>
#include <joinable/participant/step.hpp>

namespace {

using namespace joinable_tests;
using joinable::ContractViolation;
using joinable::DataParallelOptions;
using joinable::DistributedDataParallel;
using joinable::Join;
using joinable::JoinedGradients;
using joinable::participants;
using joinable::Sgd;
using joinable::Step;

using Params = std::vector<Param<double>>;

/// A parameter of an engine that drops gradients.
struct Dropping {
    Param<double> param{1};
    [[nodiscard]] double& g() const { return param.g(0); }
};

struct OutOfMemory : std::runtime_error {
    OutOfMemory() : std::runtime_error{"out of memory"} {}
};

} // namespace

template <>
struct joinable::parameter_traits<Dropping> {
    static std::vector<double>* value(Dropping& p) { return &p.param.value; }
    static joinable::AnyView* grad(Dropping& p) { return p.param.grad ? &p.param.grad : nullptr; }
    static void set_grad(Dropping& p, joinable::AnyView const& view) { p.param.grad = view; }
    static void release_grad(Dropping& p) { p.param.grad = {}; }
};

namespace {

TEST_CASE("a batch that failed is stepped by no rank, whatever the options of a model") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        for (bool const is_static : {false, true}) {
            for (bool const accumulates : {false, true}) {
                for (bool const lists_unused : {false, true}) {
                    for (JoinedGradients const joined :
                         {JoinedGradients::zeroed_at_end, JoinedGradients::kept}) {
                        Params params = make_params<double>({1});
                        DistributedDataParallel ddp{
                            comm,
                            params,
                            {.find_unused = !is_static,
                             .static_graph = is_static,
                             .sync_at_end = false,
                             .joined_gradients = joined}
                        };
                        Step step{comm, [&] {
                                      params[0].value[0] -= params[0].g(0);
                                      params[0].g(0) = 0;
                                  }};
                        Join guard{participants(ddp, step)};
                        if (comm.rank() == 0) {
                            if (accumulates) {
                                ddp.forward([] {}, {.will_sync = false});
                                ddp.backward([&](auto ready) {
                                    params[0].g(0) += 8;
                                    ready(0);
                                });
                            }
                            auto const unused = [&](std::size_t) -> bool {
                                if (lists_unused) {
                                    throw OutOfMemory{};
                                }
                                return false;
                            };
                            try {
                                ddp.forward([] {});
                                auto const pass = [&](auto) {
                                    params[0].g(0) += 8;
                                    throw OutOfMemory{};
                                };
                                is_static ? ddp.backward(pass) : ddp.backward(pass, unused);
                            } catch (OutOfMemory const&) {
                                ddp.skip();
                            }
                            step.step();
                        }
                        guard.finish();
                        CHECK(params[0].value[0] == 0);
                    }
                }
            }
        }
    });
}

TEST_CASE("replicas with momentum stay equal after a skip that sends what was accumulated") {
    over_ranks({1, 2, 3, 4}, [](RankCommunicator& comm) {
        std::vector<Dropping> params(2);
        std::vector<double> momentum(2, 0.0);
        auto const drop = [&] {
            for (Dropping& mine : params) {
                mine.param.grad = {};
            }
        };
        drop();
        DistributedDataParallel ddp{comm, params, {.find_unused = true, .sync_at_end = false}};
        Step step{comm, [&] {
                      for (std::size_t i = 0; i < params.size(); ++i) {
                          if (params[i].param.grad) { // as optimizers of such engines do
                              momentum[i] = momentum[i] / 2 + params[i].g();
                              params[i].param.value[0] -= momentum[i];
                          }
                      }
                  }};
        Join guard{participants(ddp, step)};
        auto const pass = [&](std::size_t used, bool syncs) {
            std::vector<std::size_t> const unused =
                used == 2 ? std::vector<std::size_t>{} : std::vector<std::size_t>{1};
            ddp.forward([] {}, {.will_sync = syncs});
            ddp.backward(
                [&](auto ready) {
                    for (std::size_t i = used; i-- > 0;) {
                        Param<double>& mine = params[i].param;
                        if (!mine.grad) {
                            mine.storage.assign(1, 0.0);
                            mine.grad = joinable::AnyView{mine.storage};
                        }
                        params[i].g() += 4;
                        ready(i);
                    }
                },
                unused
            );
        };
        pass(2, true); // momentum of both
        step.step();
        if (comm.rank() == 0) {
            drop();
            pass(1, false);
            ddp.skip(); // sends parameter 0, and has no gradient of parameter 1
            step.step();
        }
        guard.finish();
        double const second = 4.0 / comm.size();
        CHECK(params[0].param.value[0] == -4 - (2 + second));
        CHECK(params[1].param.value[0] == -4);
    });
}

/// Two guards; ranks other than 0 hold a window when they join the first one. Gives the value of rank 0.
template <class Model, class Pass>
void train_twice(
    RankCommunicator& comm, Params& params, Model& model, bool carries, Pass const& pass
) {
    auto const clear = [&] { params[0].g(0) = 0; };
    clear();
    {
        Join guard{participants(model), {.carry_accumulated = carries}};
        pass(guard, 4, false);
        if (comm.rank() == 0) {
            pass(guard, 0, true);
            clear(); // after the step, which joined ranks do not run
        }
        guard.finish();
    }
    Join guard{participants(model), {.carry_accumulated = carries}};
    pass(guard, 1, true);
    clear();
    guard.finish();
}

TEST_CASE("what a joined rank held is counted once where averages go to owners alone") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        for (bool const carries : {true, false}) {
            double const ranks = carries ? comm.size() : 1;
            double const expected = -(4 * ranks / comm.size()) - 1;
            {
                Params params = make_params<double>({1});
                joinable::ZeroRedundancyOptimizer zero{
                    comm, params, Sgd{.learning_rate = 1}, {.reduces_gradients = true}
                };
                train_twice(
                    comm,
                    params,
                    zero,
                    carries,
                    [&](auto& guard, double gradient, bool syncs) {
                        guard.next(true, {.will_sync = syncs});
                        params[0].g(0) += gradient;
                        if (syncs) {
                            zero.step();
                        }
                    }
                );
                CHECK(params[0].value[0] == doctest::Approx(expected));
            }
            Params params = make_params<double>({1});
            joinable::ShardedDataParallel sharded{
                comm, params, Sgd{.learning_rate = 1}, {.sharding = joinable::Sharding::gradients}
            };
            train_twice(comm, params, sharded, carries, [&](auto&, double gradient, bool syncs) {
                sharded.forward([] {}, {.will_sync = syncs});
                sharded.backward([&](auto ready) {
                    params[0].g(0) += gradient;
                    ready(0);
                });
                if (syncs) {
                    sharded.step();
                }
            });
            CHECK(params[0].value[0] == doctest::Approx(expected));
        }
    });
}

TEST_CASE(
    "an iteration that was left open outside a guard is refused in the guard, also with a map under way"
) {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        std::vector<Param<float>> params = make_params<float>({4, 4});
        joinable::DistributedDataParallel ddp{
            comm,
            params,
            joinable::DataParallelOptions{.find_unused = true, .bucket_caps_bytes = {16}}
        };
        ddp.forward([] {});
        CHECK_THROWS_AS(
            ddp.backward([](auto const&) { throw std::runtime_error{"oops"}; }), std::runtime_error
        );
        std::string text;
        try {
            joinable::Join guard{joinable::participants(ddp)};
            if (comm.rank() == 0) { // the others join at once
                ddp.forward([] {});
                ddp.backward([](auto const& ready) { ready(1); }, {std::size_t{0}});
            }
            guard.finish();
        } catch (std::exception const& error
        ) { // ContractViolation, or PeerFailed of a rank that was faster
            text = error.what();
        }
        CHECK(text.find("the previous iteration was not finalized") != std::string::npos);
    });
}

TEST_CASE("averages do not stay in gradients of joined ranks when a guard ends by an exception") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        DistributedDataParallel ddp{comm, params};
        double average = 0;
        auto const round = [&] {
            ddp.forward([] {});
            ddp.backward([&](auto ready) {
                params[0].g(0) += 8;
                ready(0);
            });
            average = params[0].g(0);
            params[0].g(0) = 0;
        };
        try {
            Join guard{participants(ddp)};
            round();
            if (comm.rank() == 1) {
                round();
                throw OutOfMemory{}; // between rounds: the communicator stays usable
            }
            guard.finish();
        } catch (joinable::PeerFailed const&) {
            CHECK(params[0].g(0) == 0);
        } catch (OutOfMemory const&) {
        }
        CHECK_NOTHROW(ddp.attach_state()); // no round is open
        Join guard{participants(ddp)};
        round();
        guard.finish();
        CHECK(average == 8);
    });
}

TEST_CASE("a model is in no round once an exception has left a guard in one of its passes") {
    over_ranks({1, 2, 4}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        DistributedDataParallel ddp{comm, params};
        auto const train = [&] {
            Join guard{participants(ddp)};
            ddp.forward([] {});
            ddp.backward([](auto) { throw OutOfMemory{}; });
        };
        CHECK_THROWS(train()
        ); // on all ranks: OutOfMemory, or PeerFailed where another one was faster
        CHECK_NOTHROW(ddp.discard_window());
        CHECK_NOTHROW(ddp.set_buffer_hook({}));
    });
}

TEST_CASE("a model that is destroyed before its guard is named where the guard ends") {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        auto ddp = joinable::make_data_parallel(comm, params);
        auto const run = [&] {
            Join guard{participants(*ddp)};
            ddp->forward([] {});
            ddp->backward([](auto ready) { ready(0); });
            if (comm.rank() == 0) {
                ddp.reset();
            }
        };
        CHECK(
            std::string{thrown_by<ContractViolation>(run).what()} ==
            "participant 0 (DistributedDataParallel) on rank 0 was destroyed before the Join that it takes part "
            "in; declare the Join after its participants"
        );
    });
}

TEST_CASE(
    "skip() may follow a pass that failed before a gradient was ready, however fast others are"
) {
    over_ranks({2, 3, 4}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1, 1});
        DistributedDataParallel ddp{
            comm, params, DataParallelOptions{.bucket_cap_bytes = 1, .find_unused = true}
        };
        Join guard{participants(ddp)};
        ddp.forward([] {});
        comm.barrier(); // all ranks are here
        if (comm.rank() == 0) {
            std::this_thread::sleep_for(std::chrono::milliseconds{20}
            ); // so that others have sent their maps
            try {
                ddp.backward([](auto) { throw OutOfMemory{}; }, {1});
            } catch (OutOfMemory const&) {
                CHECK_NOTHROW(ddp.skip());
            }
        } else {
            ddp.backward([](auto ready) {
                ready(1);
                ready(0);
            });
        }
        guard.finish();
    });
}

TEST_CASE("skip() may follow a pass without a gradient, though what was accumulated fills a bucket"
) {
    over_ranks({1, 2, 3, 4}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1, 1});
        DistributedDataParallel ddp{
            comm,
            params,
            DataParallelOptions{
                .bucket_cap_bytes = 1,
                .first_bucket_bytes = 1,
                .find_unused = true,
                .rebuild_buckets = false
            }
        };
        Join guard{participants(ddp)};
        ddp.forward([] {}, {.will_sync = false});
        ddp.backward(
            [&](auto ready) {
                params[1].g(0) = 4;
                ready(1);
            },
            {0}
        );
        ddp.forward([] {});
        if (comm.rank() == 0) {
            try {
                ddp.backward([](auto) { throw OutOfMemory{}; }, {1});
            } catch (OutOfMemory const&) {
                CHECK_NOTHROW(ddp.skip());
            }
        } else {
            ddp.backward([](auto ready) { ready(0); }, {1});
        }
        CHECK(guard.finish().rounds == 2);
    });
}

TEST_CASE("skip() is too late once the first bucket is full, however slow others are") {
    auto const check = [](RankCommunicator& comm, bool is_full, bool is_first) {
        Params params = make_params<double>({1, 1, 1});
        DistributedDataParallel ddp{
            comm,
            params,
            DataParallelOptions{
                .bucket_cap_bytes = 16,
                .first_bucket_bytes = 16,
                .find_unused = true,
                .rebuild_buckets = false
            }
        };
        auto const train = [&] {
            Join guard{participants(ddp)};
            ddp.forward([] {});
            comm.barrier();
            if ((comm.rank() == 0) != is_first) { // the other one has sent its map, or none has
                std::this_thread::sleep_for(std::chrono::milliseconds{20});
            }
            try {
                ddp.backward([&](auto ready) {
                    ready(2);
                    if (comm.rank() != 0 || is_full) {
                        ready(1);
                    }
                    if (comm.rank() == 0) {
                        throw OutOfMemory{};
                    }
                    ready(0);
                });
            } catch (OutOfMemory const&) {
                ddp.skip();
            }
            guard.finish();
        };
        if (!is_full) {
            CHECK_NOTHROW(train());
        } else if (comm.rank() == 0) {
            CHECK_THROWS_AS(train(), ContractViolation);
        } else {
            CHECK_THROWS_AS(train(), joinable::PeerFailed);
        }
    };
    for (bool const is_full : {false, true}) {
        for (bool const is_first : {false, true}) {
            over_ranks({2, 3, 4}, [&](RankCommunicator& comm) { check(comm, is_full, is_first); });
        }
    }
}

TEST_CASE("skip() after an evaluation that failed skips the next batch, as forward() would train it"
) {
    over_ranks({1, 2, 4}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        DistributedDataParallel ddp{comm, params};
        Join guard{participants(ddp)};
        try {
            ddp.forward([] { throw OutOfMemory{}; }, {.phase = joinable::Phase::evaluate});
        } catch (OutOfMemory const&) {
        }
        if (comm.rank() == 0) {
            ddp.skip();
        } else {
            ddp.forward([] {});
            ddp.backward([&](auto ready) {
                params[0].g(0) = 4;
                ready(0);
            });
        }
        CHECK(params[0].g(0) == 4.0 * (comm.size() - 1) / comm.size());
        CHECK(guard.finish().rounds == 2);
    });
}

/// A reduction that scales, and notes the factors that it is given.
struct NotesFactors : joinable::AllReduce {
    std::vector<double>* factors;

    template <class Comm>
    [[nodiscard]] static bool scales(Comm&) noexcept {
        return true;
    }
    template <class Comm>
    [[nodiscard]] joinable::work_of<Comm>
    start(Comm& comm, joinable::BucketRun const& run, double factor, bool contributes) const {
        factors->push_back(factor);
        CHECK(contributes == (factor != 1.0));
        return comm.all_reduce(run.buffer, joinable::ReduceOp::sum);
    }
};

TEST_CASE("a reduction is given the factor 1 by a rank that contributes nothing") {
    over_ranks({1, 2, 4}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        std::vector<double> factors;
        joinable::Reducer reducer{
            comm, joinable::parameters(params), {}, NotesFactors{{}, &factors}
        };
        reducer.prepare_for_backward(0.5);
        reducer.mark_ready(0);
        reducer.finalize_backward();
        reducer.prepare_for_backward(0.5);
        reducer.contribute_nothing(); // the pass failed
        reducer.finalize_backward();
        reducer.contribute_zeros();
        CHECK(factors == std::vector<double>{0.5, 1, 1});
    });
}

/// One rank of two, beside one that adds the same. The first collective cannot start.
struct FailingOnce {
    int calls = 0;

    static int rank() { return 0; }
    static int size() { return 2; }
    joinable::CompletedWork all_reduce(joinable::Buffer buffer, joinable::ReduceOp) {
        if (calls++ == 0) {
            throw std::bad_alloc{};
        }
        for (std::size_t i = 0; i < buffer.count; ++i) {
            static_cast<double*>(buffer.data)[i] *= 2;
        }
        return {};
    }
    static joinable::CompletedWork broadcast(joinable::Buffer, int) { return {}; }
    static void barrier() {}
};

TEST_CASE(
    "a bucket whose collective could not start is never delivered, and the batch can be skipped"
) {
    FailingOnce comm;
    Params params = make_params<double>({1, 1});
    joinable::Reducer reducer{
        comm, joinable::parameters(params), {.bucket_cap_bytes = 1, .rebuild_buckets = false}
    };
    for (auto& param : params) {
        param.g(0) = 8;
    }
    reducer.prepare_for_backward(0.5);
    CHECK_THROWS_AS(reducer.mark_ready(1), std::bad_alloc);
    std::string const text = thrown_by<ContractViolation>([&] { reducer.mark_ready(0); }).what();
    CHECK(text.find("the reduction of a bucket could not start") != std::string::npos);
    CHECK_THROWS_AS(reducer.finalize_backward(), ContractViolation);
    reducer.contribute_nothing();
    reducer.finalize_backward();
    CHECK(params[0].g(0) == 0);
    CHECK(params[1].g(0) == 0);
    params[0].g(0) = params[1].g(0) = 8;
    reducer.prepare_for_backward(0.5);
    reducer.mark_ready(1);
    reducer.mark_ready(0);
    reducer.finalize_backward();
    CHECK(params[0].g(0) == 8);
    CHECK(params[1].g(0) == 8);
}

TEST_CASE(
    "gradients that lie in buckets are released when the model ends, and those of the engine stay"
) {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        for (bool const as_views : {false, true}) {
            std::vector<Dropping> params(2);
            params[0].param.grad = {};
            std::vector<double> own{7.0};
            params[1].param.grad = joinable::AnyView{own};
            {
                DistributedDataParallel ddp{comm, params, {.gradient_as_bucket_view = as_views}};
                Join guard{participants(ddp)};
                if (comm.rank() == 0) {
                    ddp.forward([] {});
                    ddp.backward([&](auto ready) {
                        ready(0); // it has no gradient, as on ranks that have joined
                        ready(1);
                    });
                    params[1].param.grad = joinable::AnyView{own};
                }
                guard.finish();
                CHECK(params[0].param.grad);
            }
            CHECK(!params[0].param.grad);
            if (comm.rank() == 0 || !as_views) {
                CHECK(params[1].param.grad.data() == own.data());
            }
        }
    });
}

TEST_CASE("a model that outlives its guard's other participant is left as after any guard") {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        DistributedDataParallel ddp{comm, params, {.find_unused = true}};
        auto body = [] {};
        using ItsStep = joinable::Step<RankCommunicator, decltype(body)>;
        try {
            std::optional<Join<decltype(ddp), ItsStep>> guard;
            ItsStep step{comm, body}; // destroyed before the guard
            guard.emplace(participants(ddp, step));
            ddp.forward([] {});
            throw OutOfMemory{};
        } catch (std::runtime_error const&) { // a rank may hear of another one's first
        }
        CHECK_NOTHROW(ddp.discard_window()); // no round is open
    });
}

} // namespace
