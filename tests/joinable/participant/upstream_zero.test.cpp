// SPDX-License-Identifier: BSL-1.0
// What PyTorch's test_zero_redundancy_optimizer.py (2.15) expects, said of this library. The oracles: closed
// forms, and one rank that computes in double from the formulas of the papers. Every test there, and where it is
// here: in this file under the same name, in zero_redundancy_optimizer.test.cpp (Z), or nowhere, and why.
//
// test_state_dict                    Z: "state is gathered whole, by name, and settings are loaded with it"
// test_lr_scheduler (two of them)    here
// test_step_with_kwargs,
// test_step_with_extra_inner_key     here: what an engine's optimizer needs, and says, are its members
// test_step_without_closure          every test
// test_zero_grad                     nowhere: engines zero gradients, an optimizer never does
// test_constructor                   here, and Z: "what cannot be sharded is refused with its name"; what is no
//                                    range of parameters does not compile (tests/fail/parameters_of_*.cpp)
// test_same_dense_param_type         here, the other way round: dtypes may differ. Tensors are dense
// test_step, test_step_with_closure  here, and closure.test.cpp
// test_sharding                      Z: "parameters are dealt out largest first, to the rank with the least"
// test_add_param_group,
// test_multiple_param_groups         here
// test_collect_shards                Z: "state moves from any number of ranks to any other ..."
// test_nondefault_process_group      here
// test_local_optimizer_parity        here; a parameter that is frozen later is refused (Z: "a parameter that is
//                                    frozen, or trained, after it was given is refused")
// test_zero_join_cpu, _gpu           here; joined ranks get gradients without a hook of the test's own
// test_zero_model_parallel           nowhere: the parameters of an optimizer are on one device
// test_ddp_zero_overlap              here; without iterations to warm up, and with each way to overlap
#include <joinable/participant/sharded/data_parallel.hpp>
#include <joinable/participant/sharded/zero_redundancy_optimizer.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <functional>
#include <list>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <over_ranks.hpp>
#include <support/gathered_param.hpp>
#include <support/linear_model.hpp>
#include <support/numbers.hpp>
#include <support/volume.hpp>

#include <joinable/communicator/capabilities.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/participant/data_parallel.hpp>

namespace {

using namespace joinable_tests;
using joinable::Adam;
using joinable::AdamW;
using joinable::DistributedDataParallel;
using joinable::Join;
using joinable::participants;
using joinable::Partition;
using joinable::Sgd;
using joinable::ShardedDataParallel;
using joinable::ShardedOptions;
using joinable::Sharding;
using joinable::ZeroRedundancyOptimizer;
using AllNumbers = std::vector<Numbers>;
using Weights = CopyingParamOf<double>;

// -- optimizers, in double ---------------------------------------------------------------------------

/// Adam's state of one parameter.
struct Moments {
    Numbers first;
    Numbers second;
    int steps = 0;
};

/// Sutskever et al., 2013, as PyTorch writes it: the learning rate multiplies the velocity.
void step_by(Sgd const& rule, Numbers& values, Numbers const& gradients, Moments& moments) {
    moments.first.resize(values.size());
    for (std::size_t k = 0; k < values.size(); ++k) {
        double const by =
            (rule.maximize ? -gradients[k] : gradients[k]) + rule.weight_decay * values[k];
        moments.first[k] = rule.momentum * moments.first[k] + by;
        values[k] -= rule.learning_rate * moments.first[k];
    }
}
/// Kingma and Ba, 2015, algorithm 1; with AdamW Loshchilov and Hutter, 2019, algorithm 2.
template <class Rule>
void step_by(Rule const& rule, Numbers& values, Numbers const& gradients, Moments& moments) {
    constexpr bool is_decoupled = std::is_same_v<Rule, AdamW>;
    moments.first.resize(values.size());
    moments.second.resize(values.size());
    ++moments.steps;
    for (std::size_t k = 0; k < values.size(); ++k) {
        double by = rule.maximize ? -gradients[k] : gradients[k];
        double const decay = rule.weight_decay * values[k];
        by += is_decoupled ? 0.0 : decay;
        values[k] -= is_decoupled ? rule.learning_rate * decay : 0.0;
        moments.first[k] = rule.beta1 * moments.first[k] + (1 - rule.beta1) * by;
        moments.second[k] = rule.beta2 * moments.second[k] + (1 - rule.beta2) * by * by;
        double const first = moments.first[k] / (1 - std::pow(rule.beta1, moments.steps));
        double const second = moments.second[k] / (1 - std::pow(rule.beta2, moments.steps));
        values[k] -= rule.learning_rate * first / (std::sqrt(second) + rule.epsilon);
    }
}

// -- trainings ---------------------------------------------------------------------------------------

/// Linear layers one after another, as upstream's models are. Parameters: weight and bias of each layer.
struct Training {
    std::vector<std::size_t> widths;
    std::size_t rows; ///< of a batch
    std::function<int(int rank)> rounds;
    std::function<double(std::size_t k, double output)> slope; ///< of the loss, by output k
    std::vector<std::vector<std::size_t>> groups = {}; ///< parameters of each; none: one of all
    int stride = 1;                                    ///< rank r has the inputs of rank r * stride
    bool has_views = false;
    bool is_static = false;
    std::size_t bucket_cap_bytes = std::size_t{1} << 20U;
};

AllNumbers start_of(Training const& training) {
    AllNumbers values;
    for (std::size_t l = 0; l + 1 < training.widths.size(); ++l) {
        values.emplace_back(training.widths[l] * training.widths[l + 1]);
        values.emplace_back(training.widths[l + 1]);
    }
    for (std::size_t i = 0; i < values.size(); ++i) {
        for (std::size_t k = 0; k < values[i].size(); ++k) {
            values[i][k] = (static_cast<double>((i * 5 + k * 7) % 13) - 6.0) / 12.0;
        }
    }
    return values;
}

/// The gradients of one batch, by hand.
AllNumbers gradients_of(Training const& training, AllNumbers const& values, int rank, int round) {
    std::vector<std::size_t> const& widths = training.widths;
    std::size_t const layers = widths.size() - 1;
    AllNumbers layer{Numbers(training.rows * widths[0])};
    for (std::size_t k = 0; k < layer[0].size(); ++k) {
        auto const seed = static_cast<std::size_t>(rank * training.stride * 5 + round * 3) + k * 7;
        layer[0][k] = (static_cast<double>(seed % 11) - 4.5) / 8.0;
    }
    for (std::size_t l = 0; l < layers; ++l) {
        layer.emplace_back(training.rows * widths[l + 1]);
        for (std::size_t k = 0; k < layer[l + 1].size(); ++k) {
            std::size_t const row = k / widths[l + 1];
            std::size_t const to = k % widths[l + 1];
            layer[l + 1][k] = values[2 * l + 1][to];
            for (std::size_t from = 0; from < widths[l]; ++from) {
                layer[l + 1][k] +=
                    values[2 * l][to * widths[l] + from] * layer[l][row * widths[l] + from];
            }
        }
    }
    AllNumbers gradients;
    for (Numbers const& value : values) {
        gradients.emplace_back(value.size());
    }
    Numbers slopes(layer.back().size());
    for (std::size_t k = 0; k < slopes.size(); ++k) {
        slopes[k] = training.slope(k, layer.back()[k]);
    }
    for (std::size_t l = layers; l-- > 0;) {
        Numbers before(layer[l].size());
        for (std::size_t k = 0; k < slopes.size(); ++k) {
            std::size_t const row = k / widths[l + 1];
            std::size_t const to = k % widths[l + 1];
            gradients[2 * l + 1][to] += slopes[k];
            for (std::size_t from = 0; from < widths[l]; ++from) {
                std::size_t const weight = to * widths[l] + from;
                gradients[2 * l][weight] += slopes[k] * layer[l][row * widths[l] + from];
                before[row * widths[l] + from] += slopes[k] * values[2 * l][weight];
            }
        }
        slopes = std::move(before);
    }
    return gradients;
}

struct Trained {
    AllNumbers values;
    std::vector<Moments> moments;
};

/// On one rank: gradients are summed over the ranks that have inputs, and divided by all.
template <class Rule>
Trained
train_alone(Training const& training, int world, std::vector<Rule> const& rules, int more = 0) {
    Trained trained{start_of(training), {}};
    trained.moments.resize(trained.values.size());
    std::vector<Rule> rule_of(trained.values.size(), rules[0]);
    for (std::size_t g = 0; g < training.groups.size(); ++g) {
        for (std::size_t const i : training.groups[g]) {
            rule_of[i] = rules[g];
        }
    }
    int rounds = 0;
    for (int rank = 0; rank < world; ++rank) {
        rounds = std::max(rounds, training.rounds(rank) + more);
    }
    for (int round = 0; round < rounds; ++round) {
        AllNumbers averages;
        for (Numbers const& value : trained.values) {
            averages.emplace_back(value.size());
        }
        for (int rank = 0; rank < world; ++rank) {
            if (round < training.rounds(rank) + more) {
                AllNumbers const own = gradients_of(training, trained.values, rank, round);
                for (std::size_t i = 0; i < own.size(); ++i) {
                    for (std::size_t k = 0; k < own[i].size(); ++k) {
                        averages[i][k] += own[i][k] / world;
                    }
                }
            }
        }
        for (std::size_t i = 0; i < averages.size(); ++i) {
            step_by(rule_of[i], trained.values[i], averages[i], trained.moments[i]);
        }
    }
    return trained;
}

bool are_close(Numbers const& found, Numbers const& expected) {
    bool are = found.size() == expected.size();
    for (std::size_t k = 0; are && k < found.size(); ++k) {
        are = std::abs(found[k] - expected[k]) <= 1e-9 * (1 + std::abs(expected[k]));
    }
    return are;
}

AllNumbers values_of(std::vector<Weights> const& params) {
    AllNumbers values;
    for (Weights const& param : params) {
        values.push_back(param.value);
    }
    return values;
}
void set_gradient(Weights& param, Numbers const& numbers) {
    if (!param.grad) {
        param.storage = numbers;
        param.grad = joinable::AnyView{param.storage};
    } else {
        write(param.grad, numbers);
    }
}

enum class Way {
    beside_a_model,
    by_itself,
    sharded_optimizer,
    sharded_gradients,
    sharded_parameters
};
constexpr Way ways[] = {
    Way::beside_a_model,
    Way::by_itself,
    Way::sharded_optimizer,
    Way::sharded_gradients,
    Way::sharded_parameters
};
Sharding sharding_of(Way way) {
    return way == Way::sharded_optimizer   ? Sharding::optimizer
           : way == Way::sharded_gradients ? Sharding::gradients
                                           : Sharding::parameters;
}

/// Trains on ranks; `look(optimizer, parameters)` sees the result.
template <class Comm, class Rule, class Look>
void train(
    Comm& comm,
    Training const& training,
    std::vector<Rule> const& rules,
    Way way,
    Partition partition,
    Look const& look
) {
    std::vector<Weights> params;
    for (Numbers const& value : start_of(training)) {
        params.emplace_back(value.size());
        params.back().value = value;
        params.back().grad = {};
    }
    std::vector<std::vector<Weights*>> groups(training.groups.size());
    std::vector<std::size_t> order; // of all groups
    for (std::size_t g = 0; g < groups.size(); ++g) {
        for (std::size_t const i : training.groups[g]) {
            groups[g].push_back(&params[i]);
            order.push_back(i);
        }
    }
    if (groups.empty()) {
        groups.emplace_back();
        for (std::size_t i = 0; i < params.size(); ++i) {
            groups[0].push_back(&params[i]);
            order.push_back(i);
        }
    }
    auto const add_groups = [&](auto& optimizer) {
        for (std::size_t g = 1; g < groups.size(); ++g) {
            optimizer.add_parameter_group(groups[g], rules[g]);
        }
    };
    auto const run = [&](auto& guard, auto const& round) {
        for (int i = 0; i < training.rounds(comm.rank()); ++i) {
            round(i);
        }
        guard.finish();
    };
    auto const run_passes = [&](auto& model, int round) {
        AllNumbers gradients;
        model.forward([&](auto const&... use) {
            [[maybe_unused]] auto const hold_all = [&](auto const& use_one) {
                std::vector<decltype(use_one(0))> held;
                for (std::size_t k = 0; k < order.size(); ++k) {
                    held.push_back(use_one(k));
                }
                return held;
            };
            [[maybe_unused]] auto const held = std::make_tuple(hold_all(use)...);
            gradients = gradients_of(training, values_of(params), comm.rank(), round);
        });
        model.backward([&](auto const& ready, auto const&... use) {
            for (std::size_t k = order.size(); k-- > 0;) {
                (static_cast<void>(use(k)), ...);
                set_gradient(params[order[k]], gradients[order[k]]);
                ready(k);
            }
        });
    };
    joinable::ZeroOptions const options{
        .partition = partition,
        .bucket_cap_bytes = training.bucket_cap_bytes,
        .reduces_gradients = way == Way::by_itself
    };
    if (way == Way::by_itself) {
        ZeroRedundancyOptimizer zero{comm, groups[0], rules[0], options};
        add_groups(zero);
        {
            Join guard{participants(zero)};
            run(guard, [&](int round) {
                auto const gradients =
                    gradients_of(training, values_of(params), comm.rank(), round);
                for (std::size_t i = 0; i < params.size(); ++i) {
                    set_gradient(params[i], gradients[i]);
                }
                zero.step();
            });
        }
        look(zero, params);
    } else if (way == Way::beside_a_model) {
        std::vector<Weights*> all;
        for (std::size_t const i : order) {
            all.push_back(&params[i]);
        }
        DistributedDataParallel ddp{
            comm,
            all,
            {.bucket_cap_bytes = training.bucket_cap_bytes,
             .gradient_as_bucket_view = training.has_views,
             .static_graph = training.is_static}
        };
        ZeroRedundancyOptimizer zero{comm, groups[0], rules[0], options};
        add_groups(zero);
        {
            Join guard{participants(ddp, zero)};
            run(guard, [&](int round) {
                run_passes(ddp, round);
                zero.step();
            });
        }
        look(zero, params);
    } else {
        ShardedDataParallel sharded{
            comm,
            groups[0],
            rules[0],
            ShardedOptions{
                .sharding = sharding_of(way),
                .partition = partition,
                .bucket_cap_bytes = training.bucket_cap_bytes,
                .gradient_as_bucket_view = training.has_views
            }
        };
        add_groups(sharded);
        {
            Join guard{participants(sharded)};
            run(guard, [&](int round) {
                run_passes(sharded, round);
                sharded.step();
            });
        }
        auto const held = sharded.use_all();
        look(sharded, params);
    }
}

/// Every way and partition has the values of one rank.
template <class Comm, class Rule>
void check_every_way(Comm& comm, Training const& training, std::vector<Rule> const& rules) {
    Trained const expected = train_alone(training, comm.size(), rules);
    for (Way const way : ways) {
        for (Partition const partition : {Partition::by_parameters, Partition::flat}) {
            train(comm, training, rules, way, partition, [&](auto&, auto const& params) {
                for (std::size_t i = 0; i < params.size(); ++i) {
                    CHECK(are_close(params[i].value, expected.values[i]));
                }
            });
        }
    }
}

double sign_of(std::size_t, double output) {
    return output < 0 ? -1.0 : 1.0;
}
double one(std::size_t, double) {
    return 1.0;
}

// -- the tests ---------------------------------------------------------------------------------------

// test_lr_scheduler, of one rank and of several. There zero_grad() comes before step(), which steps nothing then.
TEST_CASE("a learning rate that falls tenfold in each round is that of all ranks") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        std::vector<Param<double>> params = make_params<double>({1, 1}, 1.0);
        DistributedDataParallel ddp{comm, params};
        ZeroRedundancyOptimizer zero{comm, params, Sgd{.learning_rate = 0.01}};
        Join guard{participants(ddp, zero)};
        for (int round = 0; round < 5 + comm.rank(); ++round) {
            drop_gradients(params);
            ddp.forward([] {});
            ddp.backward([&](auto ready) {
                for (std::size_t i = 2; i-- > 0;) {
                    add_gradient(params[i], 1.0);
                    ready(i);
                }
            });
            zero.step();
            zero.rule().learning_rate *= 0.1; // StepLR, after the step
        }
        guard.finish();
        double expected = 1.0;
        for (int round = 0; round < 4 + comm.size(); ++round) {
            double const active = round < 5 ? comm.size() : comm.size() + 4 - round;
            expected -= 0.01 * std::pow(0.1, round) * active / comm.size();
        }
        CHECK(params[0].value[0] == doctest::Approx(expected).epsilon(1e-14));
        CHECK(params[1].value[0] == doctest::Approx(expected).epsilon(1e-14));
    });
}

/// Appends to a list that it was given, and counts its steps in its settings.
struct Telling {
    struct Settings {
        double learning_rate = 0.1;
        int steps = 0;
    };
    std::vector<int>* told;
    Settings own = {};

    Settings& settings() { return own; }
    void step(joinable::WholeParameter const& parameter) {
        double& value = parameter.value.as<double>()(0);
        value -= own.learning_rate * parameter.gradient.as<double>()(0);
        told->push_back(5);
        ++own.steps;
    }
};

// test_step_with_kwargs, test_step_with_extra_inner_key
TEST_CASE("an engine's optimizer reaches what it was given, and shows what it noted") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        std::vector<Param<double>> params = make_params<double>({1, 1}, 1.0);
        std::vector<int> told;
        ZeroRedundancyOptimizer zero{comm, params, Telling{&told}};
        add_gradient(params[0], 1.0);
        add_gradient(params[1], 1.0);
        zero.step();
        std::vector<int> expected;
        for (std::size_t i = 0; i < params.size(); ++i) {
            CHECK(params[i].value[0] == doctest::Approx(0.9));
            if (zero.owner_of(i) == comm.rank()) {
                expected.push_back(5);
            }
        }
        CHECK(told == expected);
        CHECK(zero.rule().settings().steps == static_cast<int>(expected.size()));
    });
}

// test_constructor
TEST_CASE("parameters come as a vector, a list, a range of pointers or a ParameterList, in groups"
) {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        auto const check = [&](auto&& parameters) {
            ZeroRedundancyOptimizer zero{comm, parameters, Sgd{.momentum = 0.9}};
            CHECK(zero.groups().size() == 1);
            CHECK(zero.groups()[0].parameters.size() == 3);
        };
        std::vector<Param<double>> vector = make_params<double>({50, 10, 4});
        std::list<Param<double>> list;
        std::vector<Param<double>*> pointers;
        for (Param<double>& param : vector) {
            list.emplace_back(param.value.size());
            pointers.push_back(&param);
        }
        check(vector);
        check(list);
        check(pointers);
        check(joinable::parameters(vector));

        std::vector<Param<double>> biases = make_params<double>({10, 10});
        ZeroRedundancyOptimizer zero{comm, vector, AdamW{.weight_decay = 0.0}};
        zero.add_parameter_group(biases, AdamW{.weight_decay = 0.01});
        CHECK(zero.groups().size() == 2);
        CHECK(zero.rules()[0].weight_decay == 0.0);
        CHECK(zero.rules()[1].weight_decay == 0.01);
    });
}

// test_same_dense_param_type
TEST_CASE("parameters of float and double are stepped together, each as it is") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        for (Partition const partition : {Partition::by_parameters, Partition::flat}) {
            std::vector<Param<float>> floats = make_params<float>({1, 5}, 1.0F);
            std::vector<Param<double>> doubles = make_params<double>({1, 7}, 1.0);
            ZeroRedundancyOptimizer zero{
                comm,
                joinable::parameters(floats, doubles),
                Sgd{.learning_rate = 0.1},
                {.partition = partition}
            };
            add_gradient(floats[1], 1.0);
            add_gradient(doubles[1], 1.0);
            zero.step();
            CHECK(floats[1].value == std::vector<float>(5, 1.0F - 0.1F));
            CHECK(doubles[1].value == std::vector<double>(7, 1.0 - 0.1));
        }
    });
}

// test_step: a layer of 1 x 1, weight 1, bias 2, input rank + 1, which is the slope of the loss, too.
TEST_CASE("a step of all ranks is that by the mean of their gradients") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        std::vector<Param<double>> params = make_params<double>({1, 1});
        params[0].value[0] = 1.0;
        params[1].value[0] = 2.0;
        DistributedDataParallel ddp{comm, params};
        ZeroRedundancyOptimizer zero{comm, params, Sgd{.learning_rate = 0.01}};
        double const x = comm.rank() + 1;
        ddp.forward([] {});
        ddp.backward([&](auto ready) {
            add_gradient(params[1], x);
            ready(1);
            add_gradient(params[0], x * x);
            ready(0);
        });
        zero.step();
        double const world = comm.size();
        double const mean = (world + 1) / 2;
        double const mean_of_squares = (world + 1) * (2 * world + 1) / 6;
        CHECK(params[0].value[0] == doctest::Approx(1.0 - 0.01 * mean_of_squares).epsilon(1e-14));
        CHECK(params[1].value[0] == doctest::Approx(2.0 - 0.01 * mean).epsilon(1e-14));
    });
}

// test_step_with_closure, whose gradients nobody averages: the loss is |output - target|, which is larger.
TEST_CASE("where nobody averages, the owner's gradient is that of all ranks") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        std::vector<Param<double>> params = make_params<double>({1, 1});
        params[0].value[0] = 1.0;
        params[1].value[0] = 2.0;
        ZeroRedundancyOptimizer zero{comm, params, Sgd{.learning_rate = 0.1}};
        double const x = comm.rank() + 1;
        double const target = x + 2.0 + 1.0;
        double const loss = std::abs(x * params[0].value[0] + params[1].value[0] - target);
        CHECK(loss == doctest::Approx(1.0));
        add_gradient(params[0], -x);
        add_gradient(params[1], -1.0);
        zero.step();
        CHECK(zero.owner_of(0) == 0); // whose x is 1
        CHECK(params[0].value[0] == doctest::Approx(1.1));
        CHECK(params[1].value[0] == doctest::Approx(2.1));
    });
}

// test_add_param_group
TEST_CASE("a group that is added goes to the rank with the least, and frozen elements are no load"
) {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        auto const world = static_cast<std::size_t>(comm.size());
        auto const elements_of_this_rank = [&](auto const& zero) {
            std::size_t elements = 0;
            for (auto const& group : zero.groups()) {
                for (auto const& shard : group.shards) {
                    elements += shard.part();
                }
            }
            return elements;
        };
        std::vector<std::size_t> sizes;
        for (std::size_t rank = 0; rank < world; ++rank) {
            sizes.insert(sizes.end(), {9, 7, 5, 3});
        }
        sizes.pop_back();
        std::vector<Param<double>> params = make_params<double>(sizes);
        std::vector<Param<double>> more = make_params<double>({3});
        ZeroRedundancyOptimizer zero{comm, params, Sgd{}};
        CHECK(zero.groups().size() == 1);
        zero.add_parameter_group(more, Sgd{});
        CHECK(zero.groups().size() == 2);
        CHECK(elements_of_this_rank(zero) == 24);

        std::vector<Param<double>> some = make_params<double>({100, 3, 5, 2, 6, 4});
        std::vector<Param<double>> another = make_params<double>({3});
        some[0].requires_grad = false;
        ZeroRedundancyOptimizer frozen{comm, some, Sgd{}};
        frozen.add_parameter_group(another, Sgd{});
        CHECK(frozen.groups().size() == 2);
        // 6 5 4 3 2, then 3. By hand, in the order of the ranks:
        std::vector<std::size_t> const loads =
            world == 1   ? std::vector<std::size_t>{23}
            : world == 2 ? std::vector<std::size_t>{11, 12}
            : world == 3 ? std::vector<std::size_t>{9, 7, 7}
            : world == 4 ? std::vector<std::size_t>{6, 5, 7, 5}
                         : std::vector<std::size_t>{6, 5, 4, 3, 2, 3, 0, 0};
        CHECK(elements_of_this_rank(frozen) == loads[static_cast<std::size_t>(comm.rank())]);
    });
}

// test_multiple_param_groups: weights decay, biases do not. Groups after the first one are always added.
TEST_CASE("weights and biases in groups of their own train as one rank trains them") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        Training const training{
            .widths = {5, 10, 10, 5},
            .rows = 8,
            .rounds = [](int) { return 3; },
            .slope = one,
            .groups = {{0, 2, 4}, {1, 3, 5}}
        };
        check_every_way(
            comm,
            training,
            std::vector{
                AdamW{.learning_rate = 0.01, .weight_decay = 0.0},
                AdamW{.learning_rate = 0.01, .weight_decay = 0.01}
            }
        );
    });
}

// test_nondefault_process_group
TEST_CASE(
    "the even ranks train in a group of their own" *
    doctest::skip(!joinable::Splits<RankCommunicator>) * doctest::test_suite("[split]")
) {
    over_ranks({1, 2, 3, 4, 8}, [](auto& comm) {
        if constexpr (joinable::Splits<std::remove_reference_t<decltype(comm)>>) {
            auto group = comm.split(comm.rank() % 2, comm.rank());
            if (comm.rank() % 2 == 1) {
                return;
            }
            Training const training{
                .widths = {20, 10, 5},
                .rows = 3,
                .rounds = [](int rank) { return 5 - rank % 2; },
                .slope = sign_of,
                .stride = 2
            };
            Sgd const rule{.learning_rate = 1e-3, .momentum = 0.99};
            check_every_way(group, training, std::vector{rule});
        }
    });
}

/// What consolidate() gathers is what one rank has, and another optimizer goes on from it. Partitions take turns.
template <class Comm, class Rule>
void check_parity(Comm& comm, Rule const& rule, int turn) {
    Training const training{
        .widths = {2, 3, 3, 3}, .rows = 8, .rounds = [](int) { return 20; }, .slope = sign_of
    };
    std::vector const rules{rule};
    Trained const expected = train_alone(training, comm.size(), rules);
    Trained const later = train_alone(training, comm.size(), rules, 1);
    for (Way const way : ways) {
        bool const is_flat = turn++ % 2 == 0;
        Partition const partition = is_flat ? Partition::flat : Partition::by_parameters;
        train(comm, training, rules, way, partition, [&](auto& optimizer, auto& params) {
            optimizer.consolidate();
            joinable::OptimizerState<Rule> state;
            if (comm.rank() == 0) {
                state = optimizer.state();
            }
            for (std::size_t i = 0; i < params.size(); ++i) {
                CHECK(are_close(params[i].value, expected.values[i]));
                if (comm.rank() != 0) {
                    continue;
                }
                CHECK(state.parameters[i].steps == 20);
                for (std::size_t k = 0; k < state.parameters[i].tensors.size(); ++k) {
                    auto const& tensor = state.parameters[i].tensors[k];
                    Numbers numbers(params[i].value.size());
                    REQUIRE(tensor.elements.size() == numbers.size() * sizeof(double));
                    std::memcpy(numbers.data(), tensor.elements.data(), tensor.elements.size());
                    Moments const& moments = expected.moments[i];
                    CHECK(are_close(numbers, k == 0 ? moments.first : moments.second));
                }
            }
            ZeroRedundancyOptimizer other{comm, params, Rule{}, {.reduces_gradients = true}};
            other.load(state);
            auto const gradients = gradients_of(training, values_of(params), comm.rank(), 20);
            for (std::size_t i = 0; i < params.size(); ++i) {
                params[i].grad = {};
                set_gradient(params[i], gradients[i]);
            }
            other.step();
            for (std::size_t i = 0; i < params.size(); ++i) {
                CHECK(are_close(params[i].value, later.values[i]));
            }
        });
    }
}

// test_local_optimizer_parity
TEST_CASE(
    "each rule, up and down, has the values and the state of one rank, and goes on from them" *
    doctest::test_suite("[long]")
) {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        for (int const turn : {0, 1}) {
            if (is_left_out(static_cast<std::size_t>(turn), 2, comm.size())) {
                continue;
            }
            bool const maximize = turn == 1;
            Sgd const sgd{.learning_rate = 1e-3, .momentum = 0.9, .maximize = maximize};
            check_parity(comm, Adam{.learning_rate = 1e-3, .maximize = maximize}, turn);
            check_parity(comm, AdamW{.learning_rate = 1e-3, .maximize = maximize}, turn);
            check_parity(comm, sgd, turn);
        }
    });
}

// test_zero_join_cpu, test_zero_join_gpu: two epochs of 3 + rank inputs in one guard.
TEST_CASE("over uneven inputs Adam's shards are those of one rank in every round") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        constexpr std::size_t rows = 20;
        Training const training{
            .widths = {2, 3, 3, 3},
            .rows = rows,
            .rounds = [](int rank) { return 2 * (3 + rank); },
            .slope =
                [](std::size_t k, double output) { // the mean of squares
                    double const label = static_cast<double>(k * 5 % 7) / 4.0 - 0.75;
                    return 2 * (output - label) / (rows * 3);
                }
        };
        check_every_way(comm, training, std::vector{Adam{.learning_rate = 0.01}});
    });
}

// test_ddp_zero_overlap
TEST_CASE(
    "steps that overlap with other buckets train from the first iteration on as one rank" *
    doctest::test_suite("[long]")
) {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        std::size_t turn = 0;
        for (bool const has_views : {false, true}) {
            for (bool const is_static : {false, true}) {
                if (is_left_out(turn++, 4, comm.size())) {
                    continue;
                }
                Training const training{
                    .widths = {20, 40, 10},
                    .rows = 1,
                    .rounds = [](int) { return 5; },
                    .slope = one,
                    .has_views = has_views,
                    .is_static = is_static,
                    .bucket_cap_bytes = 1000
                };
                check_every_way(
                    comm,
                    training,
                    std::vector{Sgd{.learning_rate = 0.01, .momentum = 0.9, .weight_decay = 0.001}}
                );
            }
        }
    });
}

} // namespace
