// SPDX-License-Identifier: BSL-1.0
// Sharded optimizers whose parameters become trainable or frozen, or are added, between guards: state moves to its new
// owners, and trainings equal a serial one in double that does the same at the same step.
#include <joinable/zero.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <over_ranks.hpp>
#include <support/failure_text.hpp>
#include <support/gathered_param.hpp>
#include <support/linear_model.hpp>
#include <support/numbers.hpp>
#include <support/recording_communicator.hpp>
#include <support/strided_param.hpp>

#include <joinable/error.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/refresh.hpp>

namespace {

using namespace joinable_tests;
using joinable::Adam;
using joinable::ContractViolation;
using joinable::DistributedDataParallel;
using joinable::DType;
using joinable::Join;
using joinable::Mismatch;
using joinable::participants;
using joinable::Partition;
using joinable::PeerFailed;
using joinable::Sgd;
using joinable::ShardedDataParallel;
using joinable::Sharding;
using joinable::ZeroRedundancyOptimizer;

constexpr double rate = 0.0625;
constexpr double beta1 = 0.5;
constexpr double beta2 = 0.75;
constexpr double epsilon = 0.125;

double gradient_of(int rank, std::size_t step, std::string_view name, std::size_t element) {
    return static_cast<double>(rank + 1) * static_cast<double>(step % 5 + 1) / 4 +
           static_cast<double>(name.front() - 'a') - static_cast<double>(element) / 2;
}
/// How many inputs a rank has: 2, 4, 3, 2, ...
std::size_t inputs_of(int rank) {
    return 2 + static_cast<std::size_t>(2 * rank % 3);
}
std::size_t most_inputs(int world) {
    return world == 1 ? 2 : 4;
}
std::vector<double> start_values(int rank, std::string_view name, std::size_t size) {
    std::vector<double> values;
    for (std::size_t e = 0; e < size; ++e) {
        values.push_back(
            rank + static_cast<double>(name.back() - 'a') / 2 + static_cast<double>(e)
        );
    }
    return values;
}

/// The oracle: Adam as Kingma and Ba write it, over all batches, in one process.
struct SerialTraining {
    struct Numbers {
        std::vector<double> values, first, second;
        int steps = 0;
        bool is_trained = true;
    };
    int world;
    std::map<std::string, Numbers> parameters = {};
    std::size_t steps = 0;

    void add(std::string const& name, std::size_t size, bool is_trained) {
        std::vector<double> const zeros(size);
        parameters[name] = {start_values(0, name, size), zeros, zeros, 0, is_trained};
    }
    void set_trained(std::string const& name, bool is_trained) {
        Numbers& numbers = parameters[name];
        numbers.is_trained = is_trained;
        numbers.steps = 0; // its state begins anew
        numbers.first.assign(numbers.values.size(), 0);
        numbers.second.assign(numbers.values.size(), 0);
    }
    void epoch() {
        for (std::size_t input = 0; input < most_inputs(world); ++input, ++steps) {
            for (auto& [name, numbers] : parameters) {
                numbers.steps += numbers.is_trained ? 1 : 0;
                for (std::size_t e = 0; numbers.is_trained && e < numbers.values.size(); ++e) {
                    double average = 0;
                    for (int rank = 0; rank < world; ++rank) {
                        average +=
                            input < inputs_of(rank) ? gradient_of(rank, steps, name, e) / world : 0;
                    }
                    double& first = numbers.first[e];
                    double& second = numbers.second[e];
                    first = beta1 * first + (1 - beta1) * average;
                    second = beta2 * second + (1 - beta2) * average * average;
                    double const unbiased = first / (1 - std::pow(beta1, numbers.steps));
                    double const root =
                        std::sqrt(second / (1 - std::pow(beta2, numbers.steps))) + epsilon;
                    numbers.values[e] -= rate * unbiased / root;
                }
            }
        }
    }
};

/// A rank's model, whose parameters stay where they are when others come.
struct RankModel {
    int rank;
    int world;
    std::deque<Param<double>> parameters = {};
    std::vector<Param<double>*> listed = {};
    std::size_t steps = 0;

    void add(std::string const& name, std::size_t size, bool is_trained, bool in_front = false) {
        Param<double>& added = parameters.emplace_back(size);
        added.value = start_values(rank, name, size);
        added.name = name;
        added.requires_grad = is_trained;
        listed.insert(in_front ? listed.begin() : listed.end(), &added);
    }
    Param<double>& at(std::string const& name) {
        std::size_t i = 0;
        while (listed.at(i)->name != name) {
            ++i;
        }
        return *listed[i];
    }
    void zero_gradients() {
        for (Param<double>* param : listed) {
            for (std::size_t e = 0; param->grad && e < param->value.size(); ++e) {
                param->g(e) = 0;
            }
        }
    }
    void add_gradients(std::function<void(std::size_t)> const& ready) {
        for (std::size_t i = listed.size(); i-- > 0;) {
            Param<double>& param = *listed[i];
            if (param.requires_grad) {
                for (std::size_t e = 0; e < param.value.size(); ++e) {
                    param.g(e) += gradient_of(rank, steps, param.name, e);
                }
                ready(i);
            }
        }
    }
    template <class Ddp>
    void pass(Ddp& ddp) {
        ddp.forward([] {});
        ddp.backward([&](auto ready) { add_gradients(ready); });
    }
    /// `pass()` and step() of a batch, in guards of `of(...)`.
    template <class Pass, class... Js>
    void epoch(Pass const& batch, Js&... js) {
        std::size_t const begin = steps;
        Join guard{participants(js...)};
        for (std::size_t input = 0; input < inputs_of(rank); ++input, ++steps) {
            zero_gradients();
            batch();
        }
        guard.finish();
        zero_gradients();
        steps = begin + most_inputs(world);
    }
};

void check_equal(RankModel& model, SerialTraining const& serial) {
    for (auto const& one : serial.parameters) {
        CAPTURE(one.first);
        auto const& numbers = one.second;
        Param<double> const& param = model.at(one.first);
        for (std::size_t e = 0; e < numbers.values.size(); ++e) {
            CHECK(param.value[e] == doctest::Approx(numbers.values[e]).epsilon(1e-9));
        }
    }
}

Adam const adam{.learning_rate = rate, .beta1 = beta1, .beta2 = beta2, .epsilon = epsilon};

/// Trains, changes and trains again. `refresh(model)` lists the same parameters, or with `others` those of the model.
template <class Epoch, class Refresh>
void train(RankModel& model, SerialTraining& serial, Epoch const& epoch, Refresh const& refresh) {
    auto const both = [&] {
        epoch();
        serial.epoch();
        check_equal(model, serial);
    };
    auto const set_trained = [&](std::string const& name, bool is_trained) {
        model.at(name).requires_grad = is_trained;
        serial.set_trained(name, is_trained);
    };
    both();
    set_trained("alpha", true);
    set_trained("crown", false);
    if (model.rank != 0) { // as of a layer that each rank has made anew
        model.at("alpha").value.assign(model.at("alpha").value.size(), -1.0);
    }
    refresh(false);
    both();
    set_trained("crown", true);
    serial.add("door", 4, true);
    model.add("door", 4, true, true); // so that all indices and owners change
    refresh(true);
    both();
    refresh(false);
    both();
}
RankModel make_model(RankCommunicator& comm, SerialTraining& serial) {
    RankModel model{comm.rank(), comm.size()};
    for (auto const& [name, size, is_trained] :
         {std::tuple{"alpha", 9, false}, {"body", 5, true}, {"crown", 2, true}, {"eaves", 3, true}
         }) {
        serial.add(name, static_cast<std::size_t>(size), is_trained);
        model.add(name, static_cast<std::size_t>(size), is_trained);
    }
    return model;
}

TEST_CASE("a sharded optimizer whose parameters change steps as a serial one") {
    for (Partition const partition : {Partition::by_parameters, Partition::flat}) {
        for (bool const averages : {false, true}) {
            over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
                CAPTURE(averages);
                SerialTraining serial{comm.size()};
                RankModel model = make_model(comm, serial);
                DistributedDataParallel ddp{comm, model.listed};
                ZeroRedundancyOptimizer zero{
                    comm,
                    model.listed,
                    adam,
                    {.partition = partition, .reduces_gradients = averages}
                };
                auto const epoch = [&] {
                    if (averages) {
                        model.epoch(
                            [&] {
                                model.add_gradients([](std::size_t) {});
                                zero.step();
                            },
                            zero
                        );
                    } else {
                        model.epoch(
                            [&] {
                                model.pass(ddp);
                                zero.step();
                            },
                            ddp,
                            zero
                        );
                    }
                };
                train(model, serial, epoch, [&](bool others) {
                    if (others) {
                        ddp.refresh(model.listed);
                        zero.refresh(model.listed);
                    } else {
                        ddp.refresh();
                        zero.refresh();
                    }
                });
                zero.consolidate();
                if (comm.rank() == 0) {
                    std::vector<std::uint64_t> steps;
                    for (auto const& parameter : zero.state().parameters) {
                        steps.push_back(parameter.steps / most_inputs(comm.size()));
                    }
                    CHECK(steps == std::vector<std::uint64_t>{2, 3, 4, 2, 4}); // epochs
                }
            });
        }
    }
}

TEST_CASE("a sharded model whose parameters change trains as a serial one") {
    for (Sharding const sharding : {Sharding::none, Sharding::optimizer, Sharding::gradients}) {
        for (Partition const partition : {Partition::by_parameters, Partition::flat}) {
            over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
                CAPTURE(static_cast<int>(sharding));
                SerialTraining serial{comm.size()};
                RankModel model = make_model(comm, serial);
                ShardedDataParallel sharded{
                    comm, model.listed, adam, {.sharding = sharding, .partition = partition}
                };
                auto const epoch = [&] {
                    model.epoch(
                        [&] {
                            model.pass(sharded);
                            sharded.step();
                        },
                        sharded
                    );
                };
                train(model, serial, epoch, [&](bool others) {
                    others ? sharded.refresh(model.listed) : sharded.refresh();
                });
            });
        }
    }
}

TEST_CASE("masters of 16 bits move with their parameters, and newly trained values become masters"
) {
    over_ranks({1, 2, 3, 8}, [](RankCommunicator& comm) {
        for (Partition const partition : {Partition::by_parameters, Partition::flat}) {
            std::vector<StridedParam> params;
            for (int i = 0; i < 3; ++i) {
                params.push_back({{{DType::bf16, {5}, {1}}, {DType::bf16, {5}, {1}}, {}}});
                write(params.back().value.view(), joinable_tests::Numbers(5, 1.0));
                params.back().need_grad();
                write(params.back().grad, joinable_tests::Numbers(5, 1.0));
            }
            params[0].requires_grad = false;
            ZeroRedundancyOptimizer zero{
                comm,
                params,
                Sgd{.learning_rate = 1.0 / 1024},
                {.partition = partition, .reduces_gradients = true}
            };
            for (int step = 0; step < 8; ++step) { // each one is less than what bf16 resolves
                if (step == 4) {
                    params[0].requires_grad = true;
                }
                zero.refresh();
                zero.step();
            }
            double const first = joinable_tests::read(params[0].value.view())[4];
            CHECK(first == 1 - 4.0 / 1024);
            CHECK(joinable_tests::read(params[2].value.view())[4] == 1 - 8.0 / 1024);
        }
    });
}

TEST_CASE("values that lie in buckets move to the new ones, and stay where they are frozen") {
    over_ranks({1, 2, 3, 8}, [](RankCommunicator& comm) {
        for (Partition const partition : {Partition::by_parameters, Partition::flat}) {
            std::vector<StridedParam> engine;
            for (int i = 0; i < 3; ++i) {
                engine.push_back({{{DType::f64, {5}, {1}}, {DType::f64, {5}, {1}}, {}}});
                write(engine.back().value.view(), joinable_tests::Numbers(5, 1.0));
                engine.back().need_grad();
                write(engine.back().grad, joinable_tests::Numbers(5, 1.0));
            }
            std::vector<GatheredParam> params = gathered(std::move(engine));
            params[0].own->requires_grad = false;
            ZeroRedundancyOptimizer zero{
                comm,
                params,
                Sgd{.learning_rate = 0.25},
                {.partition = partition,
                 .reduces_gradients = true,
                 .parameters_as_bucket_view = true}
            };
            auto const value = [&](std::size_t i) { return params[i].value.as<double>()(4); };
            zero.step();
            zero.step();
            params[0].own->requires_grad = true;
            params[1].own->requires_grad = false;
            zero.refresh();
            zero.step();
            zero.refresh();
            CHECK((value(0) == 0.75 && value(1) == 0.5 && value(2) == 0.25));
            params[1].own->requires_grad = true;
            zero.refresh();
            zero.step();
            CHECK((value(0) == 0.5 && value(1) == 0.25 && value(2) == 0.0));
        }
    });
}

/// Parameters with one dimension, values of 1 on rank 0, and gradients of 1.
std::vector<GatheredParam> gathered_ones(int rank, std::vector<std::size_t> const& sizes) {
    std::vector<StridedParam> engine;
    for (std::size_t const size : sizes) {
        engine.push_back({{{DType::f64, {size}, {1}}, {DType::f64, {size}, {1}}, {}}});
        write(engine.back().value.view(), joinable_tests::Numbers(size, rank + 1.0));
        engine.back().need_grad();
        write(engine.back().grad, joinable_tests::Numbers(size, 1.0));
    }
    return gathered(std::move(engine));
}

TEST_CASE("after a refresh that is refused on one rank values lie in their buckets, and are stepped"
) {
    for (Partition const partition : {Partition::by_parameters, Partition::flat}) {
        for (std::size_t const refused : {0U, 2U}) {
            over_ranks({1, 2, 3, 8}, [&](RankCommunicator& comm) {
                CAPTURE(refused);
                std::vector<GatheredParam> params = gathered_ones(comm.rank(), {5, 3, 4});
                std::vector<GatheredParam*> const before{&params[0], &params[1]};
                std::vector<GatheredParam*> const after{&params[1], &params[0], &params[2]};
                bool const is_last = comm.rank() == comm.size() - 1;
                {
                    ZeroRedundancyOptimizer zero{
                        comm,
                        before,
                        Sgd{.learning_rate = 0.25, .momentum = 0.5},
                        {.partition = partition,
                         .reduces_gradients = true,
                         .parameters_as_bucket_view = true}
                    };
                    auto const value = [&](std::size_t i) {
                        return joinable_tests::read(params[i].value).back();
                    };
                    zero.step();
                    params[refused].set_fails = is_last;
                    std::string const text = failure_of([&] { zero.refresh(after); });
                    CHECK(text.starts_with(is_last ? "other: " : "peer: rank "));
                    zero.step();
                    CHECK((value(0) == 0.375 && value(1) == 0.375 && value(2) == 1.0));
                    params[refused].set_fails = false;
                    zero.refresh(after);
                    zero.step();
                    CHECK((value(0) == -0.0625 && value(1) == -0.0625 && value(2) == 0.75));
                }
                for (GatheredParam const& param : params) {
                    CHECK(param.releases == 1);
                }
            });
        }
    }
}

TEST_CASE("a parameter may end that was left out after its value had left the memory of its bucket"
) {
    over_ranks({1, 2, 3, 8}, [](RankCommunicator& comm) {
        std::vector<GatheredParam> params = gathered_ones(comm.rank(), {5, 3, 4, 0, 5});
        GatheredParam& left_out = params[0];
        GatheredParam& empty = params[3];
        std::vector<GatheredParam*> const others{&params[1], &params[2], &params[4]};
        {
            ZeroRedundancyOptimizer zero{
                comm,
                std::vector<GatheredParam*>{&left_out, &params[1], &params[2], &empty},
                Sgd{.learning_rate = 0.25},
                {.reduces_gradients = true, .parameters_as_bucket_view = true}
            };
            params[1].own->requires_grad = false;
            zero.refresh(); // its value stays in a bucket of before
            left_out.value = left_out.own->value.view();
            zero.refresh(others);
            left_out.reads_to_failure = empty.reads_to_failure = 1000; // as if they ended here
            zero.step();
            zero.refresh(others);
        }
        CHECK((left_out.reads_to_failure == 1000 && empty.reads_to_failure == 1000));
        CHECK((left_out.releases == 0 && empty.releases == 0));
        for (GatheredParam const* param : others) {
            CHECK(param->releases == 1);
        }
    });
}

TEST_CASE("state follows parameters without names whose values lie in buckets") {
    over_ranks({1, 2, 3, 8}, [](RankCommunicator& comm) {
        std::vector<StridedParam> engine;
        for (int i = 0; i < 3; ++i) {
            engine.push_back({{{DType::f64, {5}, {1}}, {DType::f64, {5}, {1}}, {}}});
            write(engine.back().value.view(), joinable_tests::Numbers(5, 1.0));
            engine.back().need_grad();
            write(engine.back().grad, joinable_tests::Numbers(5, 1.0));
        }
        std::vector<GatheredParam> params = gathered(std::move(engine));
        ZeroRedundancyOptimizer zero{
            comm,
            params,
            Sgd{.learning_rate = 0.25, .momentum = 0.5},
            {.reduces_gradients = true, .parameters_as_bucket_view = true}
        };
        double value = 1.0;
        double velocity = 0.0;
        for (int round = 0; round < 4; ++round) {
            velocity = 0.5 * velocity + 1.0;
            value -= 0.25 * velocity;
            zero.step();
            zero.refresh(params); // at another address than when they were given
            CHECK(params[2].value.as<double>()(4) == value);
        }
    });
}

/// Lists a parameter without a name, gives it other memory after a step, and lists another one in what it has left.
template <class Make, class Step>
void take_memory_of_another(RankCommunicator& comm, Make const& make, Step const& step) {
    Param<double> first{2, 1.0};
    Param<double> second{2};
    std::vector<Param<double>*> listed{&first};
    auto trained = make(listed);
    step(trained, listed); // its velocity is 1
    second.value.swap(first.value);
    std::fill(second.value.begin(), second.value.end(), comm.rank() + 5.0);
    listed.push_back(&second);
    trained.refresh(listed);
    step(trained, listed);
    CHECK(second.value == std::vector<double>(2, 5.0 - 0.25));
}

TEST_CASE("a parameter whose value lies where another one's was gets none of its state") {
    Sgd const sgd{.learning_rate = 0.25, .momentum = 0.5};
    auto const give_ones = [](std::vector<Param<double>*> const& listed) {
        for (Param<double>* param : listed) {
            param->g(0) = param->g(1) = 1.0;
        }
    };
    over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
        take_memory_of_another(
            comm,
            [&](auto const& listed) {
                return ZeroRedundancyOptimizer{comm, listed, sgd, {.reduces_gradients = true}};
            },
            [&](auto& zero, auto const& listed) {
                give_ones(listed);
                zero.step();
            }
        );
        for (Sharding const sharding : {Sharding::none, Sharding::optimizer, Sharding::gradients}) {
            take_memory_of_another(
                comm,
                [&](auto const& listed) {
                    return ShardedDataParallel{comm, listed, sgd, {.sharding = sharding}};
                },
                [&](auto& model, auto const& listed) {
                    model.forward([] {});
                    model.backward([&](auto ready) {
                        give_ones(listed);
                        for (std::size_t i = listed.size(); i-- > 0;) {
                            ready(i);
                        }
                    });
                    model.step();
                }
            );
        }
    });
}

TEST_CASE("groups are refreshed with their settings, from one list each") {
    over_ranks({1, 2, 3, 8}, [](RankCommunicator& comm) {
        RankModel model{comm.rank(), comm.size()};
        model.add("alpha", 3, true);
        model.add("body", 2, true);
        std::vector<Param<double>*> const first{model.listed[0]};
        std::vector<Param<double>*> second{model.listed[1]};
        ZeroRedundancyOptimizer zero{comm, first, adam, {.reduces_gradients = true}};
        zero.add_parameter_group(second, Adam{.learning_rate = 0.5});
        std::string const text = failure_of([&] { zero.refresh(model.listed); });
        CHECK(
            text ==
            "contract: refresh() was given 1 lists of parameters, but there are 2 groups; give one for each, "
            "in their order, or none for the same parameters"
        );
        model.add("crown", 2, true);
        second.push_back(model.listed[2]);
        zero.refresh(first, second);
        CHECK(zero.groups().size() == 2);
        CHECK(zero.groups()[1].parameters.size() == 2);
        CHECK(zero.groups()[1].first == 1);
        CHECK(zero.rule(1).learning_rate == 0.5);
        CHECK(model.at("crown").value[1] == start_values(0, "crown", 2)[1]);
    });
}

/// Fails to send the values of the next model, on every rank.
struct FailingBroadcast : RecordingCommunicator<RankCommunicator> {
    using RecordingCommunicator<RankCommunicator>::RecordingCommunicator;
    bool fails = false;
    auto broadcast(joinable::Buffer buffer, int root) {
        if (std::exchange(fails, false)) {
            throw std::range_error{"cannot send values"};
        }
        return RecordingCommunicator::broadcast(buffer, root);
    }
};

TEST_CASE("a group whose values could not be sent leaves nothing, and may be added again") {
    for (Partition const partition : {Partition::by_parameters, Partition::flat}) {
        over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& inner) {
            FailingBroadcast comm{inner};
            SerialTraining serial{comm.size()};
            RankModel model{comm.rank(), comm.size()};
            model.add("alpha", 9, true);
            model.add("body", 5, true);
            serial.add("alpha", 9, true);
            serial.add("body", 5, true);
            std::vector<Param<double>*> const first{model.listed[0]};
            std::vector<Param<double>*> const second{model.listed[1]};
            ZeroRedundancyOptimizer zero{
                comm, first, adam, {.partition = partition, .reduces_gradients = true}
            };
            std::string const table = zero.table();
            comm.fails = true;
            CHECK_THROWS_AS(zero.add_parameter_group(second, adam), std::range_error);
            CHECK_FALSE(comm.fails);
            CHECK(zero.groups().size() == 1);
            CHECK(zero.rules().size() == 1);
            CHECK(zero.table() == table);
            zero.refresh(first);
            zero.add_parameter_group(second, adam);
            CHECK(zero.groups().size() == 2);
            CHECK(zero.rules().size() == 2);
            auto const epoch = [&] {
                model.epoch(
                    [&] {
                        model.add_gradients([](std::size_t) {});
                        zero.step();
                    },
                    zero
                );
                serial.epoch();
                check_equal(model, serial);
            };
            epoch();
            zero.refresh();
            epoch();
        });
    }
}

TEST_CASE("owners that were chosen at the start are those of as many parameters") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        SerialTraining serial{comm.size()};
        RankModel model = make_model(comm, serial);
        std::vector<int> const owners(model.listed.size(), comm.size() - 1);
        ZeroRedundancyOptimizer zero{
            comm, model.listed, adam, {.owners = owners, .reduces_gradients = true}
        };
        CHECK(zero.owner_of(1) == comm.size() - 1);
        says(
            failure_of([&] { (void)zero.owner_of(static_cast<std::size_t>(-1)); }),
            "contract: parameter -1 has no owner"
        );
        zero.refresh(model.listed);
        auto longer = model.listed;
        model.add("door", 4, true);
        longer.push_back(model.listed.back());
        CHECK(
            failure_of([&] { zero.refresh(longer); }) ==
            "contract: refresh() lists 5 parameters, but the owners that were given are those of 4; make the "
            "optimizer anew with an owner for each, and move its state with a Checkpoint"
        );
        CHECK(zero.owner_of(1) == comm.size() - 1); // as before
    });
}

TEST_CASE("a sharded optimizer refuses what belongs elsewhere, and is as it was before") {
    over_ranks({1, 2, 3, 8}, [](RankCommunicator& comm) {
        for (Partition const partition : {Partition::by_parameters, Partition::flat}) {
            SerialTraining serial{comm.size()};
            RankModel model = make_model(comm, serial);
            ZeroRedundancyOptimizer zero{
                comm, model.listed, adam, {.partition = partition, .reduces_gradients = true}
            };
            auto const epoch = [&] {
                model.epoch(
                    [&] {
                        model.add_gradients([](std::size_t) {});
                        zero.step();
                    },
                    zero
                );
                serial.epoch();
                check_equal(model, serial);
            };
            epoch();
            {
                Join guard{participants(zero)};
                says(failure_of([&] { zero.refresh(); }), "refresh() was called in a guard");
                guard.finish();
            }
            bool const is_last = comm.rank() == comm.size() - 1;
            if (comm.size() > 1) {
                model.at("alpha").requires_grad = is_last;
                std::string text = failure_of([&] { zero.refresh(); });
                CAPTURE(text);
                CHECK(text.starts_with("mismatch: models differ: parameter 0 (alpha)"));
                model.at("alpha").requires_grad = false;

                std::vector<Param<double>*> list = model.listed;
                if (is_last) {
                    list.push_back(nullptr);
                }
                text = failure_of([&] { zero.refresh(list); });
                CHECK(text.starts_with(is_last ? "contract: " : "peer: rank"));
                says(text, "pointer 4 is null");
            }
            epoch();
        }
    });
}

TEST_CASE("a sharded model refuses an open window, and parts of values") {
    over_ranks({1, 2, 3, 8}, [](RankCommunicator& comm) {
        SerialTraining serial{comm.size()};
        RankModel model = make_model(comm, serial);
        ShardedDataParallel sharded{comm, model.listed, adam, {.sharding = Sharding::gradients}};
        auto const accumulate = [&] {
            sharded.forward([] {}, {.will_sync = false});
            sharded.backward([&](auto ready) { model.add_gradients(ready); });
        };
        accumulate();
        says(
            failure_of([&] { sharded.refresh(); }),
            "contract: refresh() was called while gradients hold batches that no round has reduced"
        );
        model.zero_gradients();
        CHECK(failure_of([&] { sharded.refresh(); }) == "");
        accumulate();
        sharded.discard_window();
        CHECK(failure_of([&] { sharded.refresh(); }) == "");

        std::vector<StridedParam> engine;
        engine.push_back({{{DType::f64, {5}, {1}}, {DType::f64, {5}, {1}}, {}}});
        std::vector<GatheredParam> params = gathered(std::move(engine));
        ShardedDataParallel parts{comm, params, adam, {.sharding = Sharding::parameters}};
        says(
            failure_of([&] { parts.refresh(); }),
            "contract: refresh() is not for Sharding::parameters, where no rank has whole values; write a "
            "Checkpoint, make the ShardedDataParallel anew, and read it"
        );
    });
}

} // namespace
