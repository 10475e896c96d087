// SPDX-License-Identifier: BSL-1.0
// Sharded trainings as one participant. The oracle: the whole optimizer on every rank beside a
// DistributedDataParallel, bit for bit. sharding_property.test.cpp draws the rest.
#include <joinable/participant/sharded/data_parallel.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <over_ranks.hpp>
#include <support/alike.hpp>
#include <support/gathered_param.hpp>
#include <support/linear_model.hpp>
#include <support/numbers.hpp>
#include <support/recording_communicator.hpp>
#include <support/sharded_training.hpp>
#include <support/strided_param.hpp>
#include <support/volume.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/participant/sharded/zero_redundancy_optimizer.hpp>

namespace {

/// A parameter whose gradient the library frees.
struct Released {
    std::vector<float> value;
    std::vector<float> grad; ///< empty: there is none
    int releases = 0;
};

} // namespace

template <>
struct joinable::parameter_traits<Released> {
    static std::vector<float>* value(Released& p) { return &p.value; }
    static std::vector<float>* grad(Released& p) { return p.grad.empty() ? nullptr : &p.grad; }
    static void release_grad(Released& p) {
        p.grad = {};
        ++p.releases;
    }
};

namespace {

using namespace joinable_tests;
using joinable::AnyView;
using joinable::ContractViolation;
using joinable::Partition;
using joinable::PeerFailed;
using joinable::ShardedDataParallel;
using joinable::ShardedOptions;
using joinable::ShardGradients;
using joinable::Sharding;
using joinable::ZeroRedundancyOptimizer;

/// Every sharding and partition, with one bucket and with many, stepped after the pass and in it.
std::vector<ShardedOptions> const all_options = [] {
    std::vector<ShardedOptions> all;
    for (Sharding const sharding : {Sharding::none, Sharding::optimizer, Sharding::gradients}) {
        for (Partition const partition : {Partition::by_parameters, Partition::flat}) {
            for (std::size_t const cap : {std::size_t{64}, std::size_t{1} << 20U}) {
                all.push_back(
                    {.sharding = sharding, .partition = partition, .bucket_cap_bytes = cap}
                );
                if (sharding == Sharding::gradients) {
                    all.push_back(all.back());
                    all.back().step_in_backward = true;
                }
            }
        }
    }
    return all;
}();

template <class Comm, class Rule>
std::vector<Numbers> train_sharded(
    Comm& comm,
    Model const& model,
    Inputs const& inputs,
    Rule const& rule,
    ShardedOptions const& options
) {
    std::vector<StridedParam> params = make(model);
    ShardedDataParallel sharded{comm, params, rule, options};
    Join guard{participants(sharded)};
    for (int round = 0; round < inputs(comm.rank()); ++round) {
        sharded.forward([] {});
        sharded.backward([&](auto ready) { backward(params, model, comm.rank(), round, ready); });
        sharded.step();
    }
    guard.finish();
    return values_of(params);
}

TEST_CASE(
    "a sharded training has the values of the whole one, bit for bit, in whatever round ranks run out" *
    doctest::test_suite("[long]")
) {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        std::size_t turn = static_cast<std::size_t>(comm.size());
        for (Inputs const& inputs : inputs_of) {
            for_each_rule([&](auto const& rule) {
                auto const whole = train_whole(comm, {}, inputs, rule);
                for (int k = 0; k < (under_sanitizer ? 1 : 3); ++k) {
                    ShardedOptions const& options = all_options[turn++ % all_options.size()];
                    CHECK(are_alike(train_sharded(comm, {}, inputs, rule, options), whole));
                }
            });
        }
    });
}

TEST_CASE("every dtype, layout and choice of trained parameters trains sharded") {
    over_ranks({1, 2, 3, 4}, [](RankCommunicator& comm) {
        Model const models[] = {
            {.dtype = DType::f64},
            {.dtype = DType::bf16},
            {.dtype = DType::f16, .has_strides = true},
            {.has_strides = true},
            {.dtype = DType::f64, .frozen = 1},
            {.is_large = true},
        };
        std::size_t turn = static_cast<std::size_t>(comm.size());
        for (Model const& model : models) {
            Adam const rule{.learning_rate = 0.02};
            auto const whole = train_whole(comm, model, inputs_of[1], rule);
            for (int k = 0; k < 4; ++k) {
                ShardedOptions const& options = all_options[turn++ % all_options.size()];
                auto const sharded = train_sharded(comm, model, inputs_of[1], rule, options);
                CHECK(are_alike(sharded, whole));
            }
        }
    });
}

TEST_CASE("each rank keeps its part of state and averages, and buckets as asked for") {
    over_ranks({1, 2, 4, 8}, [](RankCommunicator& comm) {
        std::vector<Param<float>> params = make_params<float>({4000, 70, 1000, 3000, 1, 8000});
        std::size_t const model = 16071 * sizeof(float);
        auto const ranks = static_cast<std::size_t>(comm.size());
        std::size_t const cap = 8000;
        for (Partition const partition : {Partition::flat, Partition::by_parameters}) {
            ShardedOptions options{
                .sharding = Sharding::gradients, .partition = partition, .bucket_cap_bytes = cap
            };
            ShardedDataParallel sharded{comm, params, Adam{}, options};
            // What flat parts have more is less than a cache line for each bucket.
            std::size_t const most = partition == Partition::flat ? model / ranks + 4 * 64 : model;
            CHECK(sharded.gradient_bytes() <= most);
            CHECK(sharded.state_bytes() == 2 * sharded.gradient_bytes());
            CHECK(sharded.bucket_bytes() <= 2 * (8000 * sizeof(float) + 8 * 64));
            std::uint64_t sum = sharded.gradient_bytes();
            comm.all_reduce({&sum, 1, DType::u64}, joinable::ReduceOp::sum).wait();
            CHECK(sum >= model);
            CHECK(sum <= model + (partition == Partition::flat ? ranks * 4 * 64 : 0));
            options.sharding = Sharding::optimizer;
            ShardedDataParallel whole{comm, params, Adam{}, options};
            CHECK(whole.gradient_bytes() == 0);
            CHECK(whole.state_bytes() == sharded.state_bytes());
            options.sharding = Sharding::none;
            ShardedDataParallel all{comm, params, Adam{}, options};
            CHECK(all.gradient_bytes() == 0);
            CHECK(all.bucket_bytes() == 0);
            CHECK(all.state_bytes() == 2 * model);
            CHECK_THROWS_WITH_AS(
                (void)all.owner_of(0),
                "parameter 0 has no owner: with Sharding::none each rank steps all",
                ContractViolation
            );
        }
    });
}

TEST_CASE("a joined rank steps what it owns by the averages of the others") {
    for (Sharding const sharding : {Sharding::none, Sharding::optimizer, Sharding::gradients}) {
        over_ranks({2}, [&](RankCommunicator& comm) {
            std::vector<Param<float>> params = make_params<float>({1, 1});
            ShardedDataParallel sharded{
                comm, params, Sgd{.learning_rate = 1.0}, ShardedOptions{.sharding = sharding}
            };
            Join guard{participants(sharded)};
            for (int i = 0; i < 1 + comm.rank(); ++i) {
                drop_gradients(params);
                sharded.forward([] {});
                sharded.backward([&](auto ready) {
                    for (std::size_t const k : {std::size_t{1}, std::size_t{0}}) {
                        add_gradient(params[k], 1.0);
                        ready(k);
                    }
                });
                sharded.step();
            }
            guard.finish();
            CHECK(params[0].value[0] == -1.5F);
            CHECK(params[1].value[0] == -1.5F);
        });
    }
}

TEST_CASE(
    "every rank issues the same collectives, joined ranks too, with what each communicator has"
) {
    over_ranks({1, 2, 3, 4}, [](RankCommunicator& inner) {
        for (ShardedOptions const& options : all_options) {
            RecordingCommunicator comm{inner}; // it has the five members of a communicator, no more
            auto const sharded = train_sharded(comm, {}, inputs_of[1], Adam{}, options);
            CHECK(sharded == train_whole(inner, {}, inputs_of[1], Adam{}));
            CHECK(comm.has_trace_of_all());
        }
    });
}

TEST_CASE("buckets are stepped while the backward pass runs") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        std::vector<Param<float>> params = make_params<float>({3, 3, 3, 3, 3});
        ShardedOptions const options{
            .sharding = Sharding::gradients, .bucket_cap_bytes = 12, .step_in_backward = true
        };
        ShardedDataParallel sharded{comm, params, Sgd{.learning_rate = 8.0}, options};
        float expected = 0;
        Join guard{participants(sharded)};
        for (int round = 0; round < 1 + comm.rank(); ++round) {
            drop_gradients(params);
            // Ranks that have joined take it from those that have not.
            sharded.rule().learning_rate = 1.0 + round;
            sharded.forward([] {});
            sharded.backward([&](auto ready) {
                for (std::size_t i = 5; i-- > 0;) {
                    add_gradient(params[i], static_cast<double>(comm.size()));
                    ready(i);
                    // Two buckets have memory: that of the second after this one was waited for.
                    std::size_t const stepped = i + 2;
                    if (stepped < 5 && sharded.owner_of(stepped) == comm.rank()) {
                        CHECK(params[stepped].value[0] != expected);
                    }
                }
                for (std::size_t i = 0; i < 5; ++i) { // values travel later
                    CHECK((sharded.owner_of(i) == comm.rank() || params[i].value[0] == expected));
                }
            });
            sharded.step();
            expected -= static_cast<float>((1 + round) * (comm.size() - round));
            for (Param<float> const& param : params) {
                CHECK(param.value == std::vector<float>(3, expected));
            }
        }
        guard.finish();
        float last = 0;
        for (int round = 0; round < comm.size(); ++round) {
            last -= static_cast<float>((1 + round) * (comm.size() - round));
        }
        for (Param<float> const& param : params) {
            CHECK(param.value == std::vector<float>(3, last));
        }
    });
}

TEST_CASE("steps in the backward pass need owners, and see no gradients before") {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        std::vector<Param<float>> params = make_params<float>({3});
        auto const text_of = [&](ShardedOptions const& options) {
            try {
                ShardedDataParallel{comm, params, Sgd{}, options};
            } catch (std::exception const& error) {
                return std::string{error.what()};
            }
            return std::string{};
        };
        CHECK(
            text_of({.step_in_backward = true}) ==
            "step_in_backward steps buckets that are averaged to their owners, but with "
            "Sharding::optimizer gradients are averaged on all ranks; use Sharding::gradients or "
            "Sharding::parameters"
        );
        ShardedOptions options{.sharding = Sharding::gradients, .step_in_backward = true};
        options.before_step = [](ShardGradients const&) { return true; };
        CHECK(
            text_of(options) ==
            "step_in_backward steps a bucket before the gradients of others are there, but before_step is "
            "to see all of them; leave one of the two out"
        );
        if (comm.size() > 1) {
            options.before_step = {};
            options.step_in_backward = comm.rank() == 0;
            std::string const text = text_of(options);
            CHECK(text.find("options differ: step_in_backward: rank 0 has ") != std::string::npos);
        }
    });
}

TEST_CASE("gradients become ready in any order, and each is released when it is copied") {
    over_ranks({1, 2, 3, 4}, [](RankCommunicator& comm) {
        for (bool const is_forward_order : {false, true}) {
            std::vector<Released> params(5, Released{{0, 0, 0}, {}});
            ShardedDataParallel sharded{
                comm,
                params,
                Sgd{.learning_rate = 1.0},
                ShardedOptions{.sharding = Sharding::gradients, .bucket_cap_bytes = 12}
            };
            Join guard{participants(sharded)};
            for (int round = 0; round < 1 + comm.rank(); ++round) {
                sharded.forward([] {});
                sharded.backward([&](auto ready) {
                    for (std::size_t k = 0; k < 5; ++k) {
                        std::size_t const i = is_forward_order ? k : 4 - k;
                        params[i].grad.assign(3, static_cast<float>(comm.size()));
                        ready(i);
                        CHECK(params[i].grad.empty());
                    }
                });
                sharded.step();
            }
            guard.finish();
            // Rank r has r + 1 rounds, and each gradient divided by the ranks is 1.
            auto const sum = static_cast<float>(comm.size() * (comm.size() + 1) / 2);
            for (Released const& param : params) {
                CHECK(param.value == std::vector<float>(3, -sum));
                CHECK(param.releases == 1 + comm.rank());
            }
            // One bucket travels while the next one fills; from the first to the last all fill at once.
            bool const is_alone = comm.size() == 1; // it shadows nothing
            CHECK((!is_alone || sharded.bucket_bytes() == (is_forward_order ? 5U : 2U) * 12U));
            CHECK((is_forward_order || sharded.bucket_bytes() == 2U * 12U));
        }
    });
}

TEST_CASE(
    "what a rank accumulated before it ran out counts once, also in the next guard" *
    doctest::test_suite("[long]")
) {
    for (ShardedOptions const& options : all_options) {
        over_ranks({2, 3}, [&](RankCommunicator& comm) {
            std::vector<Param<float>> params = make_params<float>({3});
            ShardedDataParallel sharded{comm, params, Sgd{.learning_rate = 1.0}, options};
            for (int epoch = 0; epoch < 2; ++epoch) {
                Join guard{participants(sharded)};
                // Rank 0 runs out after a round that did not sync.
                for (int i = 0; i < (comm.rank() == 0 ? 3 : 4); ++i) {
                    bool const syncs = i % 2 == 1;
                    sharded.forward([] {}, {.will_sync = syncs});
                    sharded.backward([&](auto ready) {
                        add_gradient(params[0], 1.0);
                        ready(0);
                    });
                    if (syncs) {
                        sharded.step();
                        drop_gradients(params);
                    }
                }
                guard.finish();
            }
            auto const ranks = static_cast<float>(comm.size());
            float const second = (2 * (ranks - 1) + 1) / ranks;
            CHECK(params[0].value[0] == doctest::Approx(-2 * (2 + second)));
        });
    }
}

TEST_CASE("averages do not stay in sharded models when a guard ends by an exception") {
    for (Sharding const sharding : {Sharding::none, Sharding::optimizer, Sharding::gradients}) {
        CAPTURE(static_cast<int>(sharding));
        over_ranks({2, 3, 4, 8}, [&](RankCommunicator& comm) {
            std::vector<Param<double>> params = make_params<double>({1});
            ShardedDataParallel sharded{
                comm, params, Sgd{.learning_rate = 1.0}, ShardedOptions{.sharding = sharding}
            };
            double const before = params[0].value[0];
            auto const round = [&] {
                drop_gradients(params);
                sharded.forward([] {});
                sharded.backward([&](auto ready) {
                    add_gradient(params[0], 8.0);
                    ready(0);
                });
                sharded.step();
            };
            try {
                Join guard{participants(sharded)};
                round();
                if (comm.rank() == 1) {
                    round(); // the others shadow it, and hold its average
                    throw std::runtime_error{"between rounds"};
                }
                guard.finish();
            } catch (joinable::PeerFailed const&) {
                if (sharding != Sharding::gradients) {
                    CHECK(params[0].g(0) == 0);
                }
            } catch (std::runtime_error const&) {
            }
            CHECK_NOTHROW(sharded.attach_state()); // no round is open
            Join guard{participants(sharded)};
            round();
            guard.finish();
            CHECK(params[0].value[0] == doctest::Approx(before - 8 - 8.0 / comm.size() - 8));
        });
    }
}

TEST_CASE("a batch that failed counts as zeros, and the round is stepped") {
    for (ShardedOptions const& options : all_options) {
        over_ranks({2, 4}, [&](RankCommunicator& comm) {
            std::vector<Param<float>> params = make_params<float>({3});
            ShardedDataParallel sharded{comm, params, Sgd{.learning_rate = 1.0}, options};
            Join guard{participants(sharded)};
            for (int round = 0; round < 3; ++round) {
                drop_gradients(params);
                bool const fails = comm.rank() == 1;
                try {
                    if (!fails || round != 0) {
                        sharded.forward([&] {
                            if (fails && round == 1) {
                                throw std::runtime_error{"a bad sample"};
                            }
                        });
                        sharded.backward([&](auto ready) {
                            if (fails) {
                                throw std::runtime_error{"a bad gradient"};
                            }
                            add_gradient(params[0], 1.0);
                            ready(0);
                        });
                    } else {
                        sharded.skip();
                    }
                } catch (std::runtime_error const&) {
                    sharded.skip();
                }
                sharded.step();
            }
            guard.finish();
            auto const ranks = static_cast<float>(comm.size());
            CHECK(params[0].value[0] == doctest::Approx(-3 * (ranks - 1) / ranks));
        });
    }
}

TEST_CASE(
    "a parameter that no pass uses is stepped by zeros, and one that some use by their average"
) {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        std::vector<Param<float>> params = make_params<float>({3, 3});
        Sgd const rule{.learning_rate = 1.0, .weight_decay = 0.5};
        ShardedOptions const options{.sharding = Sharding::gradients};
        ShardedDataParallel sharded{comm, params, rule, options};
        params[0].value.assign(3, 2.0F);
        params[1].value.assign(3, 2.0F);
        Join guard{participants(sharded)};
        sharded.forward([] {});
        auto const uses = [&](std::size_t i) { return i == 1 && comm.rank() == 0; };
        sharded.backward(
            [&](auto ready) {
                for (std::size_t const i : {std::size_t{1}, std::size_t{0}}) {
                    if (uses(i)) {
                        add_gradient(params[i], 1.0);
                        ready(i);
                    }
                }
            },
            [&](std::size_t i) { return !uses(i); }
        );
        sharded.step();
        guard.finish();
        CHECK(params[0].value[0] == 1.0F);
        CHECK(params[1].value[0] == doctest::Approx(1.0F - 1.0F / static_cast<float>(comm.size())));
    });
}

TEST_CASE("gradients in buckets stay there when a group is added, and when that fails on a rank") {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        for (bool const are_views : {true, false}) {
            auto params = gathered(make({}));
            auto others = gathered(make({.frozen = 3}));
            ShardedDataParallel sharded{
                comm,
                params,
                Sgd{.learning_rate = 1.0},
                ShardedOptions{.gradient_as_bucket_view = are_views}
            };
            auto const round = [&](auto&... lists) {
                sharded.forward([](auto const&) {});
                sharded.backward([&](auto ready, auto const&) {
                    std::size_t i = 0;
                    auto const pass = [&](auto& list) {
                        for (GatheredParam& param : list) {
                            if (param.own->requires_grad && param.own->grad) {
                                write(param.own->grad, Numbers(param.own->grad.numel(), 1.0));
                            }
                            if (param.own->requires_grad) {
                                ready(i);
                            }
                            ++i;
                        }
                    };
                    (pass(lists), ...);
                });
                sharded.step();
            };
            round(params);
            round(params);
            double const last = comm.rank() == comm.size() - 1 ? -1.0 : 1.0; // refused
            if (comm.size() > 1) {
                CHECK_THROWS(sharded.add_parameter_group(others, Sgd{.learning_rate = last}));
            }
            auto const check = [&] {
                for (GatheredParam& param : params) {
                    CHECK(read(param.own->grad) == Numbers(param.own->grad.numel(), 1.0));
                }
            };
            check();
            sharded.add_parameter_group(others, Sgd{.learning_rate = 1.0});
            check();
            round(params, others);
            check();
        }
    });
}

TEST_CASE("a step that some ranks skip is refused on all, with any sharding") {
    for (Sharding const sharding :
         {Sharding::none, Sharding::optimizer, Sharding::gradients, Sharding::parameters}) {
        over_ranks({1, 2, 3, 4}, [&](RankCommunicator& comm) {
            std::vector<CopyingParam> params;
            params.emplace_back(3U);
            params.emplace_back(3U);
            int steps = 0;
            ShardedOptions options{.sharding = sharding};
            options.before_step = [&](ShardGradients const&) {
                return steps++ == 0 || comm.rank() != 0;
            };
            ShardedDataParallel sharded{comm, params, Sgd{}, options};
            std::string text;
            try {
                Join guard{participants(sharded)};
                for (int round = 0; round < 2; ++round) {
                    sharded.forward([](auto const&) {});
                    sharded.backward([&](auto const& ready, auto const&) {
                        for (std::size_t i = 2; i-- > 0;) {
                            add_gradient(params[i], 1.0);
                            ready(i);
                        }
                    });
                    sharded.step();
                }
                guard.finish();
            } catch (std::exception const& error) { // or PeerFailed, of a rank that was faster
                text = error.what();
            }
            std::string const expected =
                "before_step skips the step on 1 of " + std::to_string(comm.size()) + " ranks, ";
            CHECK((text.find(expected) != std::string::npos) == (comm.size() > 1));
        });
    }
}

TEST_CASE("a gradient that is ready but not there is refused where it cannot be given") {
    over_ranks({1}, [](RankCommunicator& comm) {
        std::vector<Released> params(1, Released{{0, 0, 0}, {}});
        ShardedDataParallel sharded{
            comm, params, Sgd{}, ShardedOptions{.sharding = Sharding::gradients}
        };
        sharded.forward([] {});
        CHECK_THROWS_WITH_AS(
            sharded.backward([](auto ready) { ready(0); }),
            "parameter 0 on rank 0 was marked ready, but has no gradient; give it one before, or give the parameter to "
            "backward() as unused",
            ContractViolation
        );
    });
}

TEST_CASE("groups have settings of their own, buffers come from the lowest active rank") {
    for (ShardedOptions const& options : all_options) {
        over_ranks({1, 2, 3}, [&](RankCommunicator& comm) {
            std::vector<Param<float>> first = make_params<float>({3, 2});
            std::vector<Param<float>> second = make_params<float>({4});
            std::vector<std::vector<float>> buffers{{static_cast<float>(comm.rank())}};
            ShardedDataParallel sharded{
                comm, first, joinable::buffers(buffers), Sgd{.learning_rate = 1.0}, options
            };
            sharded.add_parameter_group(second, Sgd{.learning_rate = 0.5});
            CHECK(buffers[0][0] == 0.0F);
            Join guard{participants(sharded)};
            for (int round = 0; round < comm.size() - comm.rank(); ++round) {
                drop_gradients(first);
                drop_gradients(second);
                sharded.forward([&] { buffers[0][0] = static_cast<float>(10 + comm.rank()); });
                sharded.backward([&](auto ready) {
                    for (std::size_t i = 3; i-- > 0;) {
                        add_gradient(i < 2 ? first[i] : second[0], 1.0);
                        ready(i);
                    }
                });
                sharded.step();
            }
            guard.finish();
            CHECK(buffers[0][0] == 10.0F);
            float const sum = static_cast<float>(comm.size() + 1) / 2;
            CHECK(first[0].value[0] == doctest::Approx(-sum));
            CHECK(first[1].value[0] == doctest::Approx(-sum));
            CHECK(second[0].value[0] == doctest::Approx(-sum / 2));
        });
    }
}

TEST_CASE("an infinite gradient on one rank makes all ranks skip the step") {
    for (ShardedOptions options : all_options) {
        over_ranks({1, 2, 3}, [&](RankCommunicator& comm) {
            auto const is_finite = [](ShardGradients const& gradients) {
                double found[] = {0, 0}; // what is not finite, and elements
                for (auto const& [parameter, view] : gradients) {
                    for (double const number : read(view)) {
                        found[0] += std::isfinite(number) ? 0 : 1;
                        ++found[1];
                    }
                }
                gradients.sum(found);
                CHECK(found[1] == 8); // each counts once
                return found[0] == 0;
            };
            ShardedOptions own = options;
            own.before_step = is_finite;
            own.step_in_backward = false;
            std::vector<Param<float>> params = make_params<float>({3, 5});
            ShardedDataParallel sharded{comm, params, Sgd{.learning_rate = 1.0}, own};
            Join guard{participants(sharded)};
            for (int round = 0; round < 2 + comm.rank(); ++round) {
                drop_gradients(params);
                sharded.forward([] {});
                sharded.backward([&](auto ready) {
                    for (std::size_t i = 2; i-- > 0;) {
                        bool const overflows = round == 1 && comm.rank() == comm.size() - 1;
                        add_gradient(
                            params[i],
                            overflows ? std::numeric_limits<double>::infinity() : comm.size()
                        );
                        ready(i);
                    }
                });
                sharded.step();
            }
            guard.finish();
            float expected = 0;
            for (int round = 0; round <= comm.size(); ++round) {
                int active = 0;
                for (int rank = 0; rank < comm.size(); ++rank) {
                    active += round < 2 + rank ? 1 : 0;
                }
                expected -= round == 1 ? 0.0F : static_cast<float>(active);
            }
            CHECK(params[0].value[0] == expected);
            CHECK(params[1].value[4] == expected);
        });
    }
}

TEST_CASE("state moves between shardings, and to a ZeroRedundancyOptimizer") {
    over_ranks({1, 2, 4}, [](RankCommunicator& comm) {
        Adam const rule{.learning_rate = 0.02};
        auto const train_half = [&](std::vector<StridedParam>& params, auto& sharded, int first) {
            Join guard{participants(sharded)};
            for (int round = first; round < first + 2; ++round) {
                sharded.forward([] {});
                sharded.backward([&](auto ready) {
                    backward(params, {}, comm.rank(), round, ready);
                });
                sharded.step();
            }
            guard.finish();
        };
        std::vector<std::vector<Numbers>> results;
        for (ShardedOptions const& options : all_options) {
            std::vector<StridedParam> params = make({});
            ShardedDataParallel before{comm, params, rule, all_options.front()};
            train_half(params, before, 0);
            before.consolidate();
            ShardedDataParallel after{comm, params, rule, options};
            after.load(comm.rank() == 0 ? before.state() : joinable::OptimizerState<Adam>{});
            train_half(params, after, 2);
            results.push_back(values_of(params));
            CHECK(results.back() == results.front());
            CHECK(results.back() == train_whole(comm, {}, [](int) { return 4; }, rule));
            ZeroRedundancyOptimizer zero{comm, params, rule};
            after.consolidate();
            zero.load(comm.rank() == 0 ? after.state() : joinable::OptimizerState<Adam>{});
            zero.consolidate();
            if (comm.rank() == 0) {
                CHECK(zero.state().parameters[1].steps == 4);
            }
        }
    });
}

/// Can be told that its next memory is not there.
struct ScarceMemory : RecordingCommunicator<RankCommunicator> {
    using RecordingCommunicator<RankCommunicator>::RecordingCommunicator;
    bool is_short = false;
    joinable::Arena allocate(std::size_t bytes, std::size_t alignment) {
        if (std::exchange(is_short, false)) {
            throw std::bad_alloc{};
        }
        return joinable::Arena{bytes, alignment};
    }
};

void train_with_scarce_memory(RankCommunicator& inner, bool skips) {
    ScarceMemory comm{inner};
    std::vector<Param<float>> params = make_params<float>({4, 4, 4, 4, 4, 4});
    ShardedDataParallel sharded{
        comm,
        params,
        Sgd{.learning_rate = 1.0},
        ShardedOptions{.sharding = Sharding::gradients, .bucket_cap_bytes = 32}
    };
    float const all = static_cast<float>(comm.size() * (comm.size() + 1)) / 2;
    float expected = 0;
    Join guard{participants(sharded)};
    for (int round = 0; round < 2; ++round) {
        drop_gradients(params);
        for (Param<float>& param : params) {
            add_gradient(param, comm.size() * (comm.rank() + 1.0));
        }
        try {
            sharded.forward([] {});
            sharded.backward([&](auto ready) {
                ready(5);
                ready(3);
                comm.is_short = comm.rank() == 0 && round == 0; // for a third bucket
                try {
                    ready(1);
                } catch (std::bad_alloc const&) {
                    if (skips) {
                        throw;
                    }
                    ready(1);
                }
                for (std::size_t const i : {0U, 2U, 4U}) {
                    ready(i);
                }
            });
        } catch (std::bad_alloc const&) {
            sharded.skip();
        }
        CHECK(!comm.is_short);
        sharded.step();
        expected -= all - (skips && round == 0 ? 1.0F : 0.0F); // rank 0's gradient
        for (Param<float> const& param : params) {
            CHECK(param.value == std::vector<float>(4, expected));
        }
    }
    guard.finish();
}

TEST_CASE("a bucket that got no memory asks again, for the same batch or for zeros in its place") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        train_with_scarce_memory(comm, false);
        train_with_scarce_memory(comm, true);
    });
}

TEST_CASE("an engine that goes on after a step within the pass was refused hears of each refusal") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        std::vector<Param<joinable::BFloat16>> params =
            make_params<joinable::BFloat16>({8, 8, 8, 8});
        ShardedOptions const options{
            .sharding = Sharding::gradients, .bucket_cap_bytes = 16, .step_in_backward = true
        };
        ShardedDataParallel sharded{comm, params, Sgd{.learning_rate = 1.0}, options};
        for (Param<joinable::BFloat16>& param : params) {
            param.value.assign(8, joinable::BFloat16{3.0F}); // without reload()
        }
        int refused = 0;
        auto const train = [&] {
            Join guard{participants(sharded)};
            sharded.forward([] {});
            sharded.backward([&](auto ready) {
                for (std::size_t i = 4; i-- > 0;) {
                    try {
                        ready(i);
                    } catch (ContractViolation const&) {
                        ++refused;
                    } catch (PeerFailed const&) { // of a rank that was faster
                        ++refused;
                    }
                }
            });
            sharded.step();
            guard.finish();
        };
        try {
            train();
        } catch (std::exception const&) { // the last refusal, or that of a rank that was faster
            ++refused;
        }
        CHECK(refused > 0);
    });
}

TEST_CASE("verbs out of order are refused in a sentence") {
    over_ranks({1}, [](RankCommunicator& comm) {
        std::vector<Param<float>> params = make_params<float>({3, 2});
        ShardedDataParallel sharded{
            comm, params, Sgd{}, ShardedOptions{.sharding = Sharding::gradients}
        };
        auto const text_of = [&](auto const& f) {
            try {
                f();
            } catch (ContractViolation const& error) {
                return std::string{error.what()};
            }
            return std::string{};
        };
        std::string const no_gradients =
            "step() follows a backward pass that syncs, once; call it after backward() or skip(), and not "
            "in rounds that accumulate";
        std::string const not_stepped =
            "the previous round has not been stepped; call step() after each backward pass that syncs, and "
            "after skip()";
        auto const pass = [&](auto ready) {
            add_gradient(params[1], 1.0);
            add_gradient(params[0], 1.0);
            ready(1);
            ready(0);
        };
        CHECK(text_of([&] { sharded.step(); }) == no_gradients);
        sharded.forward([] {});
        sharded.backward(pass);
        CHECK(text_of([&] { sharded.forward([] {}); }) == not_stepped);
        CHECK(text_of([&] { sharded.skip(); }) == not_stepped);
        sharded.step();
        CHECK(text_of([&] { sharded.step(); }) == no_gradients);
        {
            auto const held = sharded.no_sync();
            sharded.forward([] {});
            sharded.backward(pass);
            CHECK(text_of([&] { sharded.step(); }) == no_gradients);
        }
        sharded.forward([] {});
        CHECK(text_of([&] {
                  sharded.backward([](auto ready) { ready(2); });
              }) == "parameter 2 is out of range on rank 0: there are 2 parameters");
    });
    over_ranks({1}, [](RankCommunicator& comm) {
        std::vector<Param<float>> params = make_params<float>({3, 2});
        auto const text_of = [&](auto const& pass) {
            ShardedDataParallel sharded{
                comm, params, Sgd{}, ShardedOptions{.sharding = Sharding::gradients}
            };
            try {
                sharded.forward([] {});
                sharded.backward(pass);
            } catch (ContractViolation const& error) {
                return std::string{error.what()};
            }
            return std::string{};
        };
        CHECK(
            text_of([&](auto ready) {
                ready(1);
                ready(1);
            }) ==
            "parameter 1 on rank 0 was marked ready twice in an iteration; mark a parameter that is shared by "
            "modules or used in several passes once, when its last use is done"
        );
        CHECK(
            text_of([&](auto ready) { ready(1); }) ==
            "not all gradients became ready; give those that the pass does not use to backward() or "
            "prepare_for_backward() as unused, or check that all outputs of forward reach the loss (rank 0 did not "
            "mark parameter 0)"
        );
    });
}

TEST_CASE("a Step that has nothing to step but what is sharded is refused") {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        for (Sharding const sharding : {Sharding::none, Sharding::optimizer, Sharding::gradients}) {
            std::vector<Param<float>> params = make_params<float>({3});
            std::vector<Param<float>> others = make_params<float>({3});
            ShardedDataParallel sharded{comm, params, Sgd{}, ShardedOptions{.sharding = sharding}};
            Step step{comm, [] {}};
            CHECK_THROWS_WITH_AS(
                (void)(Join{participants(sharded, step)}),
                "another participant of this guard steps, but only ShardedDataParallel averages "
                "gradients, and it steps by them itself; leave the other one out, or make a Step that "
                "steps nothing an Action",
                ContractViolation
            );
            DistributedDataParallel ddp{comm, others}; // another model
            Join{participants(sharded, ddp, step)}.finish();
        }
    });
}

TEST_CASE("a ZeroRedundancyOptimizer over what is sharded already is refused") {
    over_ranks({1, 2}, [](RankCommunicator& comm) {
        std::vector<Param<float>> params = make_params<float>({3});
        ShardedDataParallel sharded{comm, params, Sgd{}};
        ZeroRedundancyOptimizer zero{comm, params, Sgd{}};
        CHECK_THROWS_WITH_AS(
            (void)(Join{participants(sharded, zero)}),
            "participant 0 (ShardedDataParallel) and participant 1 (ZeroRedundancyOptimizer) both step parameter "
            "0, so it would be stepped twice in a round; give each parameter to one of them",
            ContractViolation
        );
        std::vector<Param<float>> others = make_params<float>({3});
        ZeroRedundancyOptimizer other{comm, others, Sgd{}};
        CHECK_THROWS_WITH_AS(
            (void)(Join{participants(sharded, other)}),
            "another participant of this guard steps, but only ShardedDataParallel averages gradients, and "
            "it steps by them itself; leave the other one out, or make a Step that steps nothing an Action",
            ContractViolation
        );
    });
}

TEST_CASE("shardings and buffers that ranks give differently are named on all of them") {
    over_ranks({2, 3}, [](RankCommunicator& comm) {
        std::vector<Param<float>> params = make_params<float>({3});
        auto const text_of = [&](ShardedOptions const& options, std::size_t buffer) {
            std::vector<std::vector<float>> buffers{std::vector<float>(buffer)};
            try {
                ShardedDataParallel{comm, params, joinable::buffers(buffers), Sgd{}, options};
            } catch (joinable::Mismatch const& error) {
                return std::string{error.what()};
            }
            return std::string{};
        };
        bool const is_last = comm.rank() == comm.size() - 1;
        ShardedOptions options;
        options.sharding = is_last ? Sharding::gradients : Sharding::optimizer;
        std::string text = text_of(options, 1);
        CHECK(
            text.find("options differ: sharding: rank 0 has optimizer, rank") != std::string::npos
        );
        text = text_of({}, is_last ? 2 : 1);
        CHECK(text.find("models differ: buffer 0") != std::string::npos);
    });
}

/// A throw at each place of a round, on each rank, active or joined.
TEST_CASE("what is thrown in a sharded round on one rank is PeerFailed on all others") {
    enum class Place { forward, first_gradient, last_gradient, step };
    for (Sharding const sharding :
         {Sharding::none, Sharding::optimizer, Sharding::gradients, Sharding::parameters}) {
        for (Place const place :
             {Place::forward, Place::first_gradient, Place::last_gradient, Place::step}) {
            for (int const culprit : {0, 1, 2}) {
                for (int const round_of_failure : {0, 1, 3}) {
                    over_ranks({3}, [&](RankCommunicator& comm) {
                        std::vector<CopyingParam> params;
                        for (std::size_t const size : {300U, 400U, 500U}) {
                            params.emplace_back(size);
                        }
                        int steps = 0;
                        int round = 0;
                        auto const fail_at = [&](Place here) {
                            int const now = here == Place::step ? steps : round;
                            if (here == place && comm.rank() == culprit &&
                                now == round_of_failure) {
                                throw std::domain_error{"no memory for the batch"};
                            }
                        };
                        ShardedOptions options{.sharding = sharding, .bucket_cap_bytes = 1200};
                        if (place == Place::step) {
                            options.before_step = [&](ShardGradients const&) {
                                fail_at(Place::step);
                                ++steps;
                                return true;
                            };
                        } else {
                            options.step_in_backward =
                                joinable::detail::reduces_to_owners(sharding) &&
                                (round_of_failure + culprit) % 2 == 0;
                        }
                        ShardedDataParallel sharded{comm, params, Adam{}, options};
                        bool failed = false;
                        try {
                            Join guard{participants(sharded)};
                            for (; round < 2 + comm.rank(); ++round) {
                                drop_gradients(params);
                                sharded.forward([&](auto const& use) {
                                    static_cast<void>(use(1));
                                    fail_at(Place::forward);
                                });
                                sharded.backward([&](auto const& ready, auto const& use) {
                                    fail_at(Place::first_gradient);
                                    for (std::size_t k = 3; k-- > 0;) {
                                        static_cast<void>(use(k));
                                        add_gradient(params[k], 1.0);
                                        ready(k);
                                    }
                                    fail_at(Place::last_gradient);
                                });
                                sharded.step();
                            }
                            guard.finish();
                        } catch (PeerFailed const& error) {
                            failed = true;
                            CHECK(comm.rank() != culprit);
                            CHECK(error.rank() == culprit);
                            CHECK(
                                std::string{error.what()}.find("no memory for the batch") !=
                                std::string::npos
                            );
                        } catch (std::domain_error const&) {
                            failed = true;
                            CHECK(comm.rank() == culprit);
                        }
                        bool const happens = place == Place::step || round_of_failure < 2 + culprit;
                        CHECK(failed == happens);
                    });
                }
            }
        }
    }
}

} // namespace
