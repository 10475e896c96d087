// SPDX-License-Identifier: BSL-1.0
// Trainings whose values are sharded, too. Gradients depend on the values that the passes see. The oracle: the
// whole optimizer on every rank beside a DistributedDataParallel, bit for bit.
#include <joinable/participant/sharded/data_parallel.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <over_ranks.hpp>
#include <support/alike.hpp>
#include <support/gathered_param.hpp>
#include <support/numbers.hpp>
#include <support/ranks.hpp>
#include <support/recording_communicator.hpp>
#include <support/sharded_training.hpp>
#include <support/strided_param.hpp>
#include <support/volume.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/participant/sharded/zero_redundancy_optimizer.hpp>

namespace {

using namespace joinable_tests;
using joinable::AnyView;
using joinable::BufferSync;
using joinable::ContractViolation;
using joinable::Partition;
using joinable::PeerFailed;
using joinable::Phase;
using joinable::ShardedDataParallel;
using joinable::ShardedOptions;
using joinable::Sharding;

using Model = joinable_tests::Model;
using Gathered = std::vector<GatheredParam>;

ShardedOptions sharded_by(Partition partition, std::size_t cap) {
    return {.sharding = Sharding::parameters, .partition = partition, .bucket_cap_bytes = cap};
}
ShardedOptions stepped_early(ShardedOptions options) {
    options.step_in_backward = true;
    return options;
}
ShardedOptions with_units(ShardedOptions options, std::vector<std::size_t> units) {
    options.units = std::move(units);
    return options;
}
/// One unit for each parameter or two, one for all, and units as a user chooses them for the seven
/// parameters of a model.
std::vector<ShardedOptions> const all_options{
    sharded_by(Partition::by_parameters, 64),
    stepped_early(sharded_by(Partition::flat, 64)),
    sharded_by(Partition::flat, 64),
    sharded_by(Partition::by_parameters, 1U << 20U),
    stepped_early(sharded_by(Partition::by_parameters, 0)), // a unit has at least one parameter
    sharded_by(Partition::flat, 1U << 20U),
    with_units(sharded_by(Partition::by_parameters, 64), {3, 1, 1, 2}),
    with_units(stepped_early(sharded_by(Partition::flat, 1U << 20U)), {1, 1, 1, 4}),
};

AnyView value_of(StridedParam const& param) {
    return param.value.view();
}
AnyView value_of(GatheredParam const& param) {
    return param.value;
}
StridedParam& engine_of(StridedParam& param) {
    return param;
}
StridedParam& engine_of(GatheredParam& param) {
    return *param.own;
}

/// The passes of an engine: the forward pass keeps what it reads, the backward pass reads it again.
template <class Params>
class Engine {
public:
    Engine(Params& params, int rank) : params_{params}, rank_{rank} {}

    template <class Use>
    void forward(Use const& use) {
        seen_.clear();
        for (std::size_t i = 0; i < params_.size(); ++i) {
            [[maybe_unused]] auto const held = use(i);
            seen_.push_back(read(value_of(params_[i])));
        }
    }
    template <class Ready, class Use>
    void backward(Ready const& ready, Use const& use, bool accumulates = false) {
        for (std::size_t i = params_.size(); i-- > 0;) {
            [[maybe_unused]] auto const held = use(i);
            CHECK(read(value_of(params_[i])) == seen_[i]);
            StridedParam& engine = engine_of(params_[i]);
            if (!engine.requires_grad) {
                continue;
            }
            bool const has_one = accumulates && engine.grad;
            engine.need_grad();
            Numbers numbers = has_one ? read(engine.grad) : Numbers(seen_[i].size());
            for (std::size_t k = 0; k < numbers.size(); ++k) {
                numbers[k] += gradient_of(rank_, round, i, k) + seen_[i][k] / 8;
            }
            write(engine.grad, numbers);
            ready(i);
        }
    }

    int round = 0;

private:
    Params& params_;
    int rank_;
    std::vector<Numbers> seen_;
};

auto const no_use = [](std::size_t) { return 0; };

/// The values after a training by the whole optimizer on every rank.
template <class Comm, class Rule>
std::vector<Numbers>
whole_values(Comm& comm, Model const& model, Inputs const& inputs, Rule const& rule) {
    std::vector<StridedParam> params = make(model);
    DistributedDataParallel ddp{comm, params};
    WholeOptimizer<Rule> whole{params, rule};
    Step step{comm, [&] { whole.step(); }};
    Engine engine{params, comm.rank()};
    Join guard{participants(ddp, step)};
    for (; engine.round < inputs(comm.rank()); ++engine.round) {
        ddp.forward([&] { engine.forward(no_use); });
        ddp.backward([&](auto ready) { engine.backward(ready, no_use); });
        step.step();
    }
    guard.finish();
    return values_of(params);
}

template <class Sharded>
std::vector<Numbers> all_values(Sharded& sharded, Gathered const& params) {
    auto const held = sharded.use_all();
    std::vector<Numbers> values;
    for (GatheredParam const& param : params) {
        values.push_back(read(param.value));
        CHECK(param.own->value.has_its_gaps());
    }
    return values;
}

template <class Comm, class Rule>
std::vector<Numbers> sharded_values(
    Comm& comm,
    Model const& model,
    Inputs const& inputs,
    Rule const& rule,
    ShardedOptions const& options
) {
    Gathered params = gathered(make(model));
    ShardedDataParallel sharded{comm, params, rule, options};
    Engine engine{params, comm.rank()};
    {
        Join guard{participants(sharded)};
        for (; engine.round < inputs(comm.rank()); ++engine.round) {
            sharded.forward([&](auto use) { engine.forward(use); });
            sharded.backward([&](auto ready, auto use) { engine.backward(ready, use); });
            sharded.step();
        }
        guard.finish();
    }
    return all_values(sharded, params);
}

TEST_CASE(
    "sharded values are those of the whole training, bit for bit, in whatever round ranks run out" *
    doctest::test_suite("[long]")
) {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        std::size_t turn = static_cast<std::size_t>(comm.size());
        for (Inputs const& inputs : inputs_of) {
            for_each_rule([&](auto const& rule) {
                auto const whole = whole_values(comm, {}, inputs, rule);
                for (int k = 0; k < (under_sanitizer ? 1 : 2); ++k) {
                    ShardedOptions const& options = all_options[turn++ % all_options.size()];
                    CHECK(are_alike(sharded_values(comm, {}, inputs, rule, options), whole));
                }
            });
        }
    });
}

// -- each sharding, and a ZeroRedundancyOptimizer ------------------------------------------------------

constexpr Sharding shardings[] = {
    Sharding::none, Sharding::optimizer, Sharding::gradients, Sharding::parameters
};

template <class Model, class Params>
void run_passes(Model& model, Engine<Params>& engine, auto const& change) {
    auto const backward = [&](auto const& ready, auto const& use) {
        engine.backward(
            [&](std::size_t i) {
                change(i);
                ready(i);
            },
            use
        );
    };
    if constexpr (requires { model.use_all(); }) {
        model.forward([&](auto use) { engine.forward(use); });
        model.backward(backward);
    } else {
        model.forward([&] { engine.forward(no_use); });
        model.backward([&](auto ready) { backward(ready, no_use); });
    }
}
auto const nothing = [](std::size_t) {};

/// The last rank has nine batches and votes to stop in its third round, the others have one to three.
template <class Guard, class Comm, class Params>
void run_until_vote(Guard& guard, Comm& comm, Params& params, auto const& round) {
    Engine engine{params, comm.rank()};
    bool const is_last = comm.rank() == comm.size() - 1;
    for (; guard.next(engine.round < (is_last ? 9 : 1 + comm.rank() % 3)); ++engine.round) {
        round(engine);
        if (is_last && engine.round == 2) {
            guard.vote_stop();
        }
    }
    auto const result = guard.finish();
    CHECK(result.stopped_early);
    CHECK(result.rounds == 3);
}

TEST_CASE("a vote ends a sharded training after the rounds, and with the values, of the whole one"
) {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        // Some gradients add up to zero, but for rounding, which a small epsilon would make steps of.
        AdamW const rule{.learning_rate = 0.02, .epsilon = 1e-2};
        std::vector<StridedParam> expected = make({});
        {
            DistributedDataParallel ddp{comm, expected};
            WholeOptimizer<AdamW> whole{expected, rule};
            Step step{comm, [&] { whole.step(); }};
            Join guard{participants(ddp, step)};
            run_until_vote(guard, comm, expected, [&](auto& engine) {
                run_passes(ddp, engine, nothing);
                step.step();
            });
        }
        auto const values = values_of(expected);
        for (Partition const partition : {Partition::by_parameters, Partition::flat}) {
            for (bool const is_alone : {false, true}) {
                std::vector<StridedParam> params = make({});
                DistributedDataParallel ddp{comm, params};
                joinable::ZeroRedundancyOptimizer zero{
                    comm, params, rule, {.partition = partition, .reduces_gradients = is_alone}
                };
                if (is_alone) {
                    Join guard{participants(zero)};
                    run_until_vote(guard, comm, params, [&](auto& engine) {
                        engine.forward(no_use);
                        engine.backward(nothing, no_use);
                        zero.step();
                    });
                } else {
                    Join guard{participants(zero, ddp)};
                    run_until_vote(guard, comm, params, [&](auto& engine) {
                        run_passes(ddp, engine, nothing);
                        zero.step();
                    });
                }
                CHECK(are_alike(values_of(params), values));
            }
            for (Sharding const sharding : shardings) {
                Gathered params = gathered(make({}));
                ShardedDataParallel sharded{
                    comm,
                    params,
                    rule,
                    ShardedOptions{
                        .sharding = sharding, .partition = partition, .bucket_cap_bytes = 64
                    }
                };
                {
                    Join guard{participants(sharded)};
                    run_until_vote(guard, comm, params, [&](auto& engine) {
                        run_passes(sharded, engine, nothing);
                        sharded.step();
                    });
                }
                CHECK(are_alike(all_values(sharded, params), values));
            }
        }
    });
}

/// The factor of the losses, which `before_step` halves where a gradient overflowed.
struct LossScale {
    double scale = 8;
    int skipped = 0;
};

/// The last rank has five batches, the others one or two. Active ranks double the scale before a pass. In the
/// third round a gradient of the last rank overflows.
template <class Guard, class Comm, class Model, class Optimizer, class Params>
void train_scaled(
    Guard& guard, Comm& comm, Model& model, Optimizer& optimizer, Params& params, LossScale* loss
) {
    Engine engine{params, comm.rank()};
    bool const is_last = comm.rank() == comm.size() - 1;
    for (; engine.round < (is_last ? 5 : 1 + comm.rank() % 2); ++engine.round) {
        if (loss != nullptr) {
            loss->scale *= 2;
        }
        run_passes(model, engine, [&](std::size_t i) {
            if (loss == nullptr) {
                return; // the oracle knows the round
            }
            auto const& grad = engine_of(params[i]).grad;
            Numbers numbers = read(grad);
            for (double& number : numbers) {
                number *= loss->scale;
            }
            if (i == 1 && engine.round == 2) {
                numbers[0] = std::numeric_limits<double>::infinity();
            }
            write(grad, numbers);
        });
        optimizer.step();
    }
    guard.finish();
}

TEST_CASE("in each sharding gradients are unscaled, clipped, and skipped by all where one overflows"
) {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        joinable::Sgd const rule{.learning_rate = 0.1, .momentum = 0.5};
        std::vector<StridedParam> expected = make({});
        { // what each rank does to all averages
            DistributedDataParallel ddp{comm, expected};
            WholeOptimizer<joinable::Sgd> whole{expected, rule};
            int rounds = 0;
            Step step{comm, [&] {
                          if (rounds++ == 2) {
                              return;
                          }
                          CHECK(clip_whole(expected, 0.25) < 1.0);
                          whole.step();
                      }};
            Join guard{participants(ddp, step)};
            train_scaled(guard, comm, ddp, step, expected, nullptr);
        }
        auto const values = values_of(expected);
        for (Sharding const sharding : shardings) {
            for (Partition const partition : {Partition::by_parameters, Partition::flat}) {
                LossScale loss;
                joinable::ClipNorm clip{0.25};
                auto const before_step = [&](joinable::ShardGradients const& gradients) {
                    gradients.scale(1 / loss.scale);
                    clip(gradients);
                    if (std::isfinite(clip.norm())) {
                        return true;
                    }
                    loss.scale /= 2;
                    ++loss.skipped;
                    return false;
                };
                Gathered params = gathered(make({}));
                ShardedDataParallel sharded{
                    comm,
                    params,
                    rule,
                    ShardedOptions{
                        .sharding = sharding,
                        .partition = partition,
                        .bucket_cap_bytes = 64,
                        .before_step = before_step,
                        .shared = {loss}
                    }
                };
                {
                    Join guard{participants(sharded)};
                    train_scaled(guard, comm, sharded, sharded, params, &loss);
                }
                CAPTURE(static_cast<int>(sharding));
                // Doubled five times and halved once, on joined ranks too.
                CHECK(loss.scale == 128.0);
                CHECK(loss.skipped == 1);
                auto const found = all_values(sharded, params);
                if (partition == Partition::by_parameters) {
                    CHECK(are_alike(found, values));
                    continue;
                }
                for (std::size_t i = 0; i < values.size(); ++i) {
                    for (std::size_t k = 0; k < values[i].size(); ++k) {
                        CHECK(std::abs(found[i][k] - values[i][k]) < 1e-6);
                    }
                }
            }
        }
    });
}

TEST_CASE("a partition of the user's own gives each rank what it says, and trains as the whole one"
) {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        Model const model{.frozen = 3};
        AdamW const rule{.learning_rate = 0.02, .epsilon = 1e-2}; // as above
        auto const whole = whole_values(comm, model, inputs_of[1], rule);
        int const last = comm.size() - 1;
        for (bool const is_lone : {false, true}) { // the last rank has everything
            std::vector<int> owners;
            for (int i = 0; i < 7; ++i) {
                owners.push_back(is_lone ? last : (last + i * i) % comm.size());
            }
            std::vector<StridedParam> const sizes = make(model);
            std::size_t owned = 0;
            for (std::size_t i = 0; i < sizes.size(); ++i) {
                bool const is_own = owners[i] == comm.rank() && i != model.frozen;
                owned += is_own ? sizes[i].value.view().numel() : 0;
            }
            auto const check_owners = [&](auto const& optimizer) {
                for (std::size_t i = 0; i < owners.size(); ++i) {
                    bool const has_owner = i != model.frozen && sizes[i].value.view().numel() != 0;
                    CHECK((!has_owner || optimizer.owner_of(i) == owners[i]));
                }
                CHECK(optimizer.state_bytes() == 2 * owned * sizeof(float));
            };
            {
                std::vector<StridedParam> params = make(model);
                DistributedDataParallel ddp{comm, params};
                joinable::ZeroRedundancyOptimizer zero{
                    comm, params, rule, {.owners = owners, .bucket_cap_bytes = 64}
                };
                check_owners(zero);
                Engine engine{params, comm.rank()};
                Join guard{participants(ddp, zero)};
                for (; engine.round < inputs_of[1](comm.rank()); ++engine.round) {
                    run_passes(ddp, engine, nothing);
                    zero.step();
                }
                guard.finish();
                CHECK(are_alike(values_of(params), whole));
            }
            for (Sharding const sharding : shardings) {
                if (sharding == Sharding::none) {
                    continue; // each rank steps all
                }
                Gathered params = gathered(make(model));
                ShardedDataParallel sharded{
                    comm,
                    params,
                    rule,
                    ShardedOptions{.sharding = sharding, .owners = owners, .bucket_cap_bytes = 64}
                };
                check_owners(sharded);
                Engine engine{params, comm.rank()};
                {
                    Join guard{participants(sharded)};
                    for (; engine.round < inputs_of[1](comm.rank()); ++engine.round) {
                        run_passes(sharded, engine, nothing);
                        sharded.step();
                    }
                    guard.finish();
                }
                CHECK(are_alike(all_values(sharded, params), whole));
            }
        }
    });
}

// -- sharded values -----------------------------------------------------------------------------------

TEST_CASE("every dtype, layout and choice of trained parameters has its values sharded") {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        std::size_t turn = 0;
        Adam const rule{.learning_rate = 0.02, .weight_decay = 0.1};
        for (Model const& model : {
                 Model{.dtype = DType::f64},
                 Model{.dtype = DType::f16, .has_strides = true},
                 Model{.dtype = DType::bf16, .frozen = 3},
                 Model{.has_strides = true, .is_large = true, .frozen = 1},
             }) {
            auto const whole = whole_values(comm, model, inputs_of[1], rule);
            for (ShardedOptions const& options : all_options) {
                if (is_left_out(turn++, 3, comm.size())) {
                    continue;
                }
                CHECK(are_alike(
                    sharded_values(comm, model, inputs_of[1], rule, options), whole, model.dtype
                ));
            }
        }
    });
}

/// A model of f32 whose units are single parameters, each of another size.
Gathered model_of_units() {
    std::vector<StridedParam> params;
    for (std::size_t const size : {16U, 32U, 48U, 64U}) {
        Shape const extents{size};
        Shape const strides{1};
        params.push_back({{{DType::f32, extents, strides}, {DType::f32, extents, strides}, {}}});
    }
    return gathered(std::move(params));
}
ShardedOptions const by_units = sharded_by(Partition::by_parameters, 64);

/// Logs what gathers values and what scatters sums, too.
template <class Comm>
class TurnRecorder : public RecordingCommunicator<Comm> {
public:
    using Counts = std::span<std::size_t const>;
    explicit TurnRecorder(Comm& inner) : RecordingCommunicator<Comm>{inner} {}

    auto all_gather(joinable::ConstBuffer in, joinable::Buffer out) {
        return this->inner_.all_gather(in, out);
    }
    auto all_gather(joinable::ConstBuffer in, joinable::Buffer out, Counts counts) {
        turns += " g" + std::to_string(out.count);
        return this->inner_.all_gather(in, out, counts);
    }
    auto reduce_scatter(joinable::ConstBuffer in, joinable::Buffer out, joinable::ReduceOp op) {
        return this->inner_.reduce_scatter(in, out, op);
    }
    auto reduce_scatter(
        joinable::ConstBuffer in, joinable::Buffer out, joinable::ReduceOp op, Counts counts
    ) {
        turns += " r" + std::to_string(in.count);
        return this->inner_.reduce_scatter(in, out, op, counts);
    }

    std::string turns;
};

TEST_CASE(
    "units are gathered once in each pass, and take turns with reductions, on joined ranks too"
) {
    run_ranks({1, 2, 3}, [](joinable::ThreadCommunicator& inner) {
        // How many units after its own a gradient becomes ready.
        for (std::size_t const late : {0U, 1U}) {
            TurnRecorder comm{inner};
            Gathered params = model_of_units();
            ShardedDataParallel sharded{comm, params, Sgd{}, by_units};
            {
                Join guard{participants(sharded)};
                for (int round = 0; round <= comm.rank(); ++round) {
                    sharded.forward([&](auto use) {
                        for (std::size_t i = 0; i < params.size(); ++i) {
                            static_cast<void>(use(i));
                        }
                    });
                    sharded.backward([&](auto ready, auto use) {
                        for (std::size_t i = params.size() + late; i-- > 0;) {
                            if (i >= late) {
                                static_cast<void>(use(i - late));
                            }
                            if (i < params.size()) {
                                params[i].own->need_grad();
                                ready(i);
                            }
                        }
                    });
                    sharded.step();
                }
                guard.finish();
            }
            std::string expected;
            for (int round = 0; round < comm.size(); ++round) {
                expected += " g16 g32 g48 g64 g64 g48 r64 g32 r48 g16 r32 r16";
            }
            CHECK(comm.turns == expected);
        }
    });
}

TEST_CASE("units have the parameters that the user gives them, of any dtypes, frozen ones aside") {
    run_ranks({1, 2, 3}, [](joinable::ThreadCommunicator& inner) {
        struct Case {
            std::vector<std::size_t> units;
            std::size_t frozen;
            std::size_t in_doubles;
            std::size_t cap; ///< of units that nobody chose
            std::string round;
            std::size_t largest; ///< unit, in bytes
        };
        constexpr std::size_t none = 99;
        for (Case const& c : {
                 Case{{1, 2, 1}, none, none, 64, " g16 g80 g64 g64 g80 r64 g16 r80 r16", 320},
                 Case{{4}, none, none, 64, " g160 g160 r160", 640},
                 Case{
                     {1, 1, 1, 1},
                     none,
                     none,
                     4096,
                     " g16 g32 g48 g64 g64 g48 r64 g32 r48 g16 r32 r16",
                     256
                 },
                 Case{{1, 2, 1}, 1, none, 64, " g16 g48 g64 g64 g48 r64 g16 r48 r16", 256},
                 Case{{1, 1, 2}, 1, none, 64, " g16 g112 g112 g16 r112 r16", 448},
                 Case{{2, 2}, none, 1, 64, " g16 g32 g112 g112 g16 g32 r112 r32 r16", 448},
             }) {
            TurnRecorder comm{inner};
            Gathered params = model_of_units();
            for (std::size_t i = 0; i < params.size(); ++i) {
                params[i].own->requires_grad = i != c.frozen;
                if (i == c.in_doubles) {
                    Shape const extents{params[i].value.numel()};
                    params[i] = GatheredParam{std::make_shared<StridedParam>(
                        StridedParam{{{DType::f64, extents, {1}}, {DType::f64, extents, {1}}, {}}}
                    )};
                }
            }
            ShardedOptions const options =
                with_units(sharded_by(Partition::by_parameters, c.cap), c.units);
            ShardedDataParallel sharded{comm, params, Sgd{}, options};
            CHECK(sharded.unit_bytes() == (std::min)(c.units.size(), std::size_t{2}) * c.largest);
            sharded.forward([](auto) {});
            sharded.backward([](auto, auto) {}, [&](std::size_t i) { return i != c.frozen; });
            sharded.step();
            CHECK(comm.turns == c.round);
        }
    });
}

TEST_CASE("a group that is added has units of its own") {
    run_ranks({1, 2, 3}, [](joinable::ThreadCommunicator& inner) {
        TurnRecorder comm{inner};
        Gathered first = model_of_units();
        Gathered second = model_of_units();
        ShardedDataParallel sharded{comm, first, Sgd{}, with_units(by_units, {2, 2})};
        sharded.add_parameter_group(second, Sgd{}, {}, {3, 1});
        sharded.forward([](auto) {}, {.phase = Phase::evaluate});
        CHECK(comm.turns == " g48 g112 g96 g64");
    });
}

TEST_CASE("units that do not fit the parameters are refused on every rank") {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        auto const text_of = [&](ShardedOptions const& options) {
            Gathered params = model_of_units();
            try {
                ShardedDataParallel{comm, params, Sgd{}, options};
            } catch (joinable::Error const& error) {
                return std::string{error.what()};
            } catch (ContractViolation const& error) {
                return std::string{error.what()};
            }
            return std::string{"nothing"};
        };
        auto const units = [](std::vector<std::size_t> list) { return with_units(by_units, list); };
        CHECK(text_of(units({2, 0, 2})) == "unit 1 has no parameters; give each unit at least one");
        CHECK(
            text_of(units({2, 1})) ==
            "the units have 3 parameters together, but the list has 4; give each parameter a unit, frozen "
            "ones too"
        );
        std::size_t const most = std::size_t(-1);
        for (auto const& list : {std::vector<std::size_t>{3, 2}, {3, most}, {5}}) {
            CHECK(
                text_of(units(list)) ==
                "units 0 to " + std::to_string(list.size() - 1) +
                    " have more parameters than the list, which has 4; give the number of parameters in "
                    "each unit"
            );
        }
        ShardedOptions elsewhere = units({4});
        elsewhere.sharding = Sharding::gradients;
        CHECK(
            text_of(elsewhere) ==
            "units are gathered with Sharding::parameters, but these are given with Sharding::gradients; "
            "leave them out"
        );
        if (comm.size() == 1) {
            return;
        }
        bool const is_last = comm.rank() == comm.size() - 1;
        std::string const last = std::to_string(comm.size() - 1);
        std::string const text = text_of(units({is_last ? 1U : 3U, is_last ? 3U : 1U}));
        CAPTURE(text);
        CHECK(text.find("options differ: units: rank 0 has") != std::string::npos);
        CHECK(text.find("rank " + last) != std::string::npos);
        // One rank alone is wrong: it says why, and the others name it.
        std::string const alone =
            text_of(units(is_last ? std::vector<std::size_t>{1} : std::vector<std::size_t>{4}));
        CAPTURE(alone);
        CHECK((alone.find("rank " + last) != std::string::npos) == !is_last);
        CHECK(alone.find("the units have 1 parameters together") != std::string::npos);
    });
}

TEST_CASE("a shard is stepped once its unit is gathered, also where no pass waits for it") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        for (std::size_t const used : {0U, 2U, 3U}) { // of four units, from the last one on
            Gathered params = model_of_units();
            ShardedDataParallel sharded{
                comm, params, Sgd{.learning_rate = 1.0}, stepped_early(by_units)
            };
            auto const is_used = [&](std::size_t i) { return i + used >= params.size(); };
            {
                Join guard{participants(sharded)};
                for (int round = 0; round < 2 + comm.rank(); ++round) {
                    sharded.forward([](auto) {});
                    sharded.backward(
                        [&](auto ready, auto use) {
                            for (std::size_t i = params.size(); i-- > 0 && is_used(i);) {
                                auto const held = use(i);
                                params[i].own->need_grad();
                                Numbers const values = read(params[i].value);
                                write(params[i].own->grad, Numbers(values.size(), comm.size()));
                                ready(i);
                                CHECK(read(params[i].value) == values);
                            }
                        },
                        [&](std::size_t i) { return !is_used(i); }
                    );
                    sharded.step();
                }
                guard.finish();
            }
            double sum = 0;
            for (int round = 0; round <= comm.size(); ++round) {
                sum += (std::min)(comm.size(), comm.size() + 1 - round);
            }
            auto const values = all_values(sharded, params);
            for (std::size_t i = 0; i < params.size(); ++i) {
                CHECK(values[i] == Numbers(values[i].size(), is_used(i) ? -sum : 0.0));
            }
        }
    });
}

/// Copies what it gathers as late as a communicator may.
template <class Comm>
class LateGathers : public RecordingCommunicator<Comm> {
public:
    struct Copy {
        joinable::ConstBuffer in;
        joinable::Buffer out;
        bool is_done = false;
        void wait() {
            if (!std::exchange(is_done, true)) {
                std::memcpy(out.data, in.data, in.count * size_of(in.dtype));
            }
        }
        bool test() const { return is_done; }
    };
    explicit LateGathers(Comm& inner) : RecordingCommunicator<Comm>{inner} {}
    Copy all_gather(joinable::ConstBuffer in, joinable::Buffer out) { return {in, out}; }
    Copy all_gather(joinable::ConstBuffer in, joinable::Buffer out, std::span<std::size_t const>) {
        return {in, out};
    }
};

TEST_CASE("a value that a pass reads late is that of before the step of its unit") {
    run_ranks({1}, [](joinable::ThreadCommunicator& inner) {
        LateGathers comm{inner};
        std::vector<StridedParam>
            engine; // the first unit has two buckets, because it has two dtypes
        for (DType const dtype : {DType::f32, DType::f64, DType::f64, DType::f64}) {
            engine.push_back({{{dtype, {8}, {1}}, {dtype, {8}, {1}}, {}}});
            write(engine.back().value.view(), Numbers(8, 2.0));
        }
        Gathered params = gathered(std::move(engine));
        Sgd const rule{.learning_rate = 1.0, .weight_decay = 0.5};
        ShardedDataParallel sharded{comm, params, rule, stepped_early(by_units)};
        sharded.forward([](auto) {});
        sharded.backward(
            [&](auto ready, auto use) {
                for (std::size_t i = params.size(); i-- > 2;) {
                    auto const held = use(i);
                    params[i].own->need_grad();
                    ready(i);
                }
                auto const held = use(1);
                CHECK(read(params[1].value) == Numbers(8, 2.0));
            },
            {0, 1}
        );
        sharded.step();
        CHECK(all_values(sharded, params)[1] == Numbers(8, 1.0));
    });
}

TEST_CASE("two units have memory at a time, and values are there while a pass uses them") {
    over_ranks({1, 2, 4}, [](RankCommunicator& comm) {
        Gathered params = model_of_units();
        ShardedDataParallel sharded{comm, params, Adam{}, by_units};
        auto const count = [&] {
            return std::count_if(params.begin(), params.end(), [](GatheredParam const& param) {
                return static_cast<bool>(param.value);
            });
        };
        CHECK(count() == 0);
        {
            Join guard{participants(sharded)};
            for (int round = 0; round < 2 + comm.rank(); ++round) {
                sharded.forward([&](auto use) {
                    for (std::size_t i = 0; i < params.size(); ++i) {
                        auto const held = use(i);
                        CHECK(count() == 1);
                        CHECK(params[i].value);
                    }
                });
                CHECK(count() == 0);
                sharded.backward([&](auto ready, auto use) {
                    for (std::size_t i = params.size(); i-- > 0;) {
                        auto const held = use(i);
                        CHECK(count() == 1);
                        params[i].own->need_grad();
                        ready(i);
                    }
                });
                CHECK(count() == 0);
                sharded.step();
            }
            guard.finish();
        }
        CHECK(sharded.unit_bytes() == 2 * 64 * sizeof(float));
        CHECK(sharded.bucket_bytes() == 2 * 64 * sizeof(float));
        CHECK(sharded.gradient_bytes() == sharded.value_bytes());
        CHECK(sharded.state_bytes() == 2 * sharded.value_bytes());
        std::uint64_t sum = sharded.value_bytes();
        comm.all_reduce({&sum, 1, DType::u64}, joinable::ReduceOp::sum).wait();
        CHECK(sum == 160 * sizeof(float));
        for (GatheredParam const& param : params) {
            CHECK(param.sets == 2 * (2 + comm.rank()));
            CHECK(param.releases == param.sets + 1);
        }
    });
}

TEST_CASE("a value that is used first and last is kept in between") {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        Gathered params = model_of_units();
        ShardedDataParallel sharded{comm, params, Sgd{.learning_rate = 1.0}, by_units};
        std::vector<Numbers> seen;
        {
            Join guard{participants(sharded)};
            for (int round = 0; round <= comm.rank(); ++round) {
                typename decltype(sharded)::HeldValues tied;
                sharded.forward([&](auto use) {
                    tied = use(0);
                    for (std::size_t i = 1; i < params.size(); ++i) {
                        static_cast<void>(use(i));
                    }
                    seen.push_back(read(params[0].value));
                });
                sharded.backward([&](auto ready, auto use) {
                    CHECK(read(params[0].value) == seen.back());
                    for (std::size_t i = params.size(); i-- > 0;) {
                        static_cast<void>(use(i));
                        params[i].own->need_grad();
                        write(params[i].own->grad, Numbers(params[i].own->grad.numel(), 1.0));
                        ready(i);
                    }
                    CHECK(read(params[0].value) == seen.back());
                    tied = {};
                });
                sharded.step();
            }
            guard.finish();
        }
        for (std::size_t round = 1; round < seen.size(); ++round) {
            CHECK(seen[round] != seen[round - 1]);
        }
        CHECK(std::none_of(params.begin(), params.end(), [](GatheredParam const& param) {
            return static_cast<bool>(param.value);
        }));
    });
}

/// Rounds that train, accumulate and evaluate, in which batches fail at different places.
template <class Comm>
std::vector<Numbers> train_with_failures(Comm& comm, ShardedOptions const& options) {
    Gathered params = gathered(make({}));
    Sgd const rule{.learning_rate = 0.1, .momentum = 0.9};
    std::vector<std::vector<float>> buffers{{1, 2, 3}};
    ShardedDataParallel sharded{comm, params, joinable::buffers(buffers), rule, options};
    Engine engine{params, comm.rank()};
    double evaluated = 0;
    for (int epoch = 0; epoch < 2; ++epoch) {
        Join guard{participants(sharded)};
        for (int round = 0; round < 9 + comm.rank() * 2; ++round, ++engine.round) {
            if (round % 4 == 3) {
                sharded.forward(
                    [&](auto use) {
                        for (std::size_t i = 0; i < params.size(); i += 2) { // not all
                            auto const held = use(i);
                            for (double const number : read(value_of(params[i]))) {
                                evaluated += number;
                            }
                        }
                    },
                    {.phase = Phase::evaluate}
                );
                continue;
            }
            bool const syncs = round % 4 != 1;
            int const failure = (round * 3 + comm.rank() * 5 + epoch) % 7;
            try {
                if (failure == 3) {
                    throw std::runtime_error{"before the round"};
                }
                sharded.forward(
                    [&](auto use) {
                        if (failure == 4) {
                            throw std::runtime_error{"before values are used"};
                        }
                        if (failure == 5) {
                            auto const held = use(2);
                            throw std::runtime_error{"in the forward pass"};
                        }
                        engine.forward(use);
                        buffers[0][0] += static_cast<float>(comm.rank());
                    },
                    {.will_sync = syncs}
                );
                sharded.backward([&](auto ready, auto use) {
                    if (failure == 6) {
                        auto const held = use(6);
                        throw std::runtime_error{"in the backward pass"};
                    }
                    engine.backward(ready, use, true);
                });
            } catch (std::runtime_error const&) {
                sharded.skip({.will_sync = syncs});
            }
            if (syncs) {
                sharded.step();
                for (GatheredParam& param : params) {
                    param.own->grad = {};
                }
            }
        }
        guard.finish();
    }
    auto values = all_values(sharded, params);
    values.push_back({evaluated});
    values.emplace_back(buffers[0].begin(), buffers[0].end());
    return values;
}

TEST_CASE(
    "rounds that evaluate, accumulate, skip or fail give what whole values give" *
    doctest::test_suite("[long]")
) {
    over_ranks({1, 2, 3, 4}, [](RankCommunicator& comm) {
        std::size_t turn = 0;
        for (ShardedOptions options : all_options) {
            if (is_left_out(turn++, 3, comm.size())) {
                continue;
            }
            options.buffer_sync = options.partition == Partition::flat ? BufferSync::before_forward
                                                                       : BufferSync::after_forward;
            ShardedOptions whole = options;
            whole.step_in_backward = false;
            whole.units = {};
            auto const values = train_with_failures(comm, options);
            for (Sharding const sharding :
                 {Sharding::none, Sharding::optimizer, Sharding::gradients}) {
                whole.sharding = sharding;
                CHECK(are_alike(values, train_with_failures(comm, whole)));
            }
        }
    });
}

TEST_CASE("a pass outside a guard gathers values, too, and groups add units") {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        Gathered first = model_of_units();
        Gathered second = model_of_units();
        ShardedDataParallel sharded{comm, first, Sgd{.learning_rate = 1.0}, by_units};
        sharded.add_parameter_group(second, Sgd{.learning_rate = 0.5});
        auto const param = [&](std::size_t i) -> GatheredParam& {
            return i < 4 ? first[i] : second[i - 4];
        };
        for (int round = 0; round < 2; ++round) {
            std::size_t const elements = sharded.forward([&](auto use) {
                std::size_t sum = 0;
                for (std::size_t i = 0; i < 8; ++i) {
                    auto const held = use(i);
                    sum += param(i).value.numel();
                }
                return sum;
            });
            CHECK(elements == 2 * 160);
            sharded.backward([&](auto ready, auto use) {
                for (std::size_t i = 8; i-- > 0;) {
                    auto const held = use(i);
                    param(i).own->need_grad();
                    write(param(i).own->grad, Numbers(param(i).value.numel(), 1.0));
                    ready(i);
                }
            });
            sharded.step();
        }
        auto const held = sharded.use_all();
        CHECK(read(first[3].value) == Numbers(64, -2.0));
        CHECK(read(second[0].value) == Numbers(16, -1.0));
    });
}

TEST_CASE("values that are loaded while all are there are those that train on") {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        for (ShardedOptions const& options : all_options) {
            Model const model{.dtype = DType::bf16, .has_strides = true};
            Gathered params = gathered(make(model));
            ShardedDataParallel sharded{comm, params, Sgd{.learning_rate = 1.0}, options};
            CHECK_THROWS_WITH_AS(
                sharded.reload(),
                "the value of parameter 0 is sharded and not there; call reload() on every rank while what "
                "use_all() returned lives",
                ContractViolation
            );
            {
                auto const held = sharded.use_all();
                for (GatheredParam const& param : params) {
                    write(param.value, Numbers(param.value.numel(), 3.0));
                }
                sharded.reload();
            }
            sharded.forward([](auto) {});
            sharded.backward([&](auto ready, auto) {
                for (std::size_t i = params.size(); i-- > 0;) {
                    params[i].own->need_grad();
                    write(params[i].own->grad, Numbers(params[i].own->grad.numel(), 1.0));
                    ready(i);
                }
            });
            sharded.step();
            for (Numbers const& numbers : all_values(sharded, params)) {
                CHECK(numbers == Numbers(numbers.size(), 2.0));
            }
        }
    });
}

TEST_CASE("values that are loaded in another order of elements are refused") {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        for (Partition const partition : {Partition::by_parameters, Partition::flat}) {
            Shape const extents{8, 8};
            std::vector<StridedParam> owned;
            owned.push_back({{{DType::f32, extents, {8, 1}}, {DType::f32, extents, {8, 1}}, {}}});
            Gathered params = gathered(std::move(owned));
            ShardedDataParallel sharded{comm, params, Sgd{}, sharded_by(partition, 64)};
            Numbers numbers(64);
            std::iota(numbers.begin(), numbers.end(), 1.0);
            auto const load = [&](OwnedTensor const& loaded) {
                auto const held = sharded.use_all();
                write(loaded.view(), numbers);
                AnyView const gathered = std::exchange(params[0].value, loaded.view());
                try {
                    sharded.reload();
                } catch (ContractViolation const&) {
                    params[0].value = gathered;
                    throw;
                }
            };
            CHECK_THROWS_WITH_AS(
                load({DType::f32, extents, {1, 8}}),
                "parameter 0 is f32 (8, 8) with strides (1, 8) now, but was f32 (8, 8) with strides (8, 1) when it "
                "was given, and the optimizer keeps its elements in that order; give the value that layout on "
                "every rank, or make a new optimizer",
                ContractViolation
            );
            CHECK_THROWS_WITH_AS(
                load({DType::f64, extents, {8, 1}}),
                "the value of parameter 0 has another type, extents or device than when it was given; copy values into "
                "it, or make the model anew",
                ContractViolation
            );
            load({DType::f32, extents, {9, 1}}); // padded rows
            CHECK(all_values(sharded, params) == std::vector<Numbers>{numbers});
        }
    });
}

TEST_CASE("use_all() that is refused on a rank leaves no memory on the others") {
    over_ranks({2, 3}, [](RankCommunicator& comm) {
        Gathered params = model_of_units();
        ShardedDataParallel sharded{comm, params, Sgd{}, by_units};
        auto held = sharded.use_all();
        if (comm.rank() != 1) {
            held.clear();
        }
        CHECK_THROWS_AS((void)sharded.use_all(), std::exception);
        CHECK(sharded.unit_bytes() == 2 * 256 + (comm.rank() == 1 ? 192 + 256 : 0));
        held.clear();
        CHECK(sharded.unit_bytes() == 2 * 256);
        held = sharded.use_all();
        CHECK(params[1].value);
        held.clear();
        sharded.forward([](auto) {});
        CHECK_THROWS_AS((void)sharded.use_all(), ContractViolation); // it has no backward pass yet
        CHECK(sharded.unit_bytes() == 2 * 256);
        sharded.skip();
        sharded.step();
    });
}

TEST_CASE("a group is added on no rank while values are held on one, and on all once it has let go"
) {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        int const holder = comm.size() == 1 ? 0 : 1;
        Gathered params = model_of_units();
        Gathered more = model_of_units();
        ShardedDataParallel sharded{comm, params, Sgd{.learning_rate = 1.0}, by_units};
        auto held = sharded.use_all();
        if (comm.rank() != holder) {
            held.clear();
        }
        std::string text;
        try {
            sharded.add_parameter_group(more, Sgd{});
        } catch (PeerFailed const& error) {
            CHECK(error.rank() == holder);
            CHECK(comm.rank() != holder);
            text = error.what();
        } catch (ContractViolation const& error) {
            CHECK(comm.rank() == holder);
            text = error.what();
        }
        CAPTURE(text);
        CHECK(text.find("is still held; let go of it before") != std::string::npos);
        CHECK(sharded.groups().size() == 1);
        held.clear();
        sharded.add_parameter_group(more, Sgd{.learning_rate = 2.0});
        CHECK(sharded.groups().size() == 2);
        sharded.forward([](auto) {});
        sharded.backward([&](auto ready, auto use) {
            for (std::size_t i = 8; i-- > 0;) {
                GatheredParam& param = i < 4 ? params[i] : more[i - 4];
                auto const there = use(i);
                param.own->need_grad();
                write(param.own->grad, Numbers(param.value.numel(), 1.0));
                ready(i);
            }
        });
        sharded.step();
        auto const all = sharded.use_all();
        CHECK(read(params[3].value) == Numbers(64, -1.0));
        CHECK(read(more[0].value) == Numbers(16, -2.0));
    });
}

TEST_CASE("all values need memory while they are there, and none afterwards") {
    over_ranks({1, 2}, [](RankCommunicator& comm) {
        Gathered params = model_of_units();
        typename ShardedDataParallel<RankCommunicator, Sgd>::HeldValues outlives;
        {
            ShardedDataParallel sharded{comm, params, Sgd{}, by_units};
            CHECK(sharded.unit_bytes() == 2 * 256);
            for (int k = 0; k < 2; ++k) {
                auto held = sharded.use_all();
                CHECK(sharded.unit_bytes() == 2 * 256 + 192 + 256);
                CHECK_THROWS_AS((void)sharded.use_all(), ContractViolation);
                CHECK_THROWS_AS(
                    sharded.add_parameter_group(std::vector<GatheredParam*>{}, Sgd{}),
                    ContractViolation
                );
                CHECK(std::all_of(params.begin(), params.end(), [](GatheredParam const& param) {
                    return static_cast<bool>(param.value);
                }));
            }
            CHECK(sharded.unit_bytes() == 2 * 256);
            outlives = std::move(sharded.use_all()[1]);
            CHECK(params[1].value);
        }
        CHECK(!params[1].value);
        outlives.release(); // of nothing
    });
}

TEST_CASE("skip() while values are held is refused before anything is sent, and can be called again"
) {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        Gathered params = model_of_units();
        ShardedDataParallel sharded{comm, params, Sgd{.learning_rate = 1.0}, by_units};
        {
            Join guard{participants(sharded)};
            for (int round = 0; round < 2 + comm.rank(); ++round) {
                typename decltype(sharded)::HeldValues tied;
                bool const fails = round == 1 && comm.rank() == 0;
                try {
                    sharded.forward([&](auto use) {
                        tied = use(0);
                        if (fails) {
                            throw std::runtime_error{"a bad sample"};
                        }
                    });
                    sharded.backward([&](auto ready, auto use) {
                        for (std::size_t i = params.size(); i-- > 0;) {
                            static_cast<void>(use(i));
                            params[i].own->need_grad();
                            write(params[i].own->grad, Numbers(params[i].value.numel(), 1.0));
                            ready(i);
                        }
                        tied.release();
                    });
                } catch (std::runtime_error const&) {
                    CHECK_THROWS_AS(sharded.skip(), ContractViolation);
                    tied.release();
                    sharded.skip();
                }
                sharded.step();
            }
            guard.finish();
        }
        float const ranks = static_cast<float>(comm.size());
        double sum = 0;
        for (int round = 0; round <= comm.size(); ++round) {
            for (int rank = 0; rank < comm.size(); ++rank) {
                sum += round < 2 + rank && !(round == 1 && rank == 0) ? 1 : 0;
            }
        }
        CHECK(all_values(sharded, params)[2][0] == doctest::Approx(-sum / ranks));
    });
}

TEST_CASE("gradients travel while a pass uses values that it kept from the forward pass") {
    run_ranks({1, 2}, [](joinable::ThreadCommunicator& inner) {
        TurnRecorder comm{inner};
        Gathered params = model_of_units();
        ShardedDataParallel sharded{comm, params, Sgd{}, by_units};
        std::vector<typename decltype(sharded)::HeldValues> kept;
        sharded.forward([&](auto use) {
            for (std::size_t i = 0; i < params.size(); ++i) {
                kept.push_back(use(i));
            }
        });
        std::vector<std::string> turns;
        sharded.backward([&](auto ready, auto use) {
            for (std::size_t i = params.size(); i-- > 0;) {
                static_cast<void>(use(i));
                params[i].own->need_grad();
                ready(i);
                kept.pop_back();
                turns.push_back(comm.turns);
            }
        });
        CHECK(turns[1] == " g16 g32 g48 g64 g64 g48 r64 g32 r48");
        CHECK(comm.turns == " g16 g32 g48 g64 g64 g48 r64 g32 r48 g16 r32 r16");
    });
}

TEST_CASE("all values that have no room on one rank fail there, and the training goes on") {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        Gathered params = model_of_units();
        ShardedDataParallel sharded{comm, params, Sgd{}, by_units};
        params[2].set_fails = comm.rank() == 0;
        bool failed = false;
        try {
            static_cast<void>(sharded.use_all());
        } catch (std::bad_alloc const&) {
            failed = true;
        }
        CHECK(failed == (comm.rank() == 0));
        CHECK(sharded.unit_bytes() == 2 * 256);
        params[2].set_fails = false;
        CHECK(all_values(sharded, params)[3].size() == 64);
    });
}

TEST_CASE("what a forward pass returns is moved out of it") {
    over_ranks({1}, [](RankCommunicator& comm) {
        Gathered params = model_of_units();
        ShardedDataParallel sharded{comm, params, Sgd{}, by_units};
        int number = 5;
        std::unique_ptr<int> const owned = sharded.forward(
            [](auto) { return std::make_unique<int>(3); }, {.phase = Phase::evaluate}
        );
        int& referred =
            sharded.forward([&](auto) -> int& { return number; }, {.phase = Phase::evaluate});
        CHECK(*owned == 3);
        CHECK(&referred == &number);
    });
}

TEST_CASE("what a pass does wrong with values is said in a sentence") {
    over_ranks({1}, [](RankCommunicator& comm) {
        auto const text_of = [&](auto const& f) {
            Gathered params = model_of_units();
            ShardedDataParallel sharded{comm, params, Sgd{}, by_units};
            try {
                f(sharded);
            } catch (ContractViolation const& error) {
                return std::string{error.what()};
            }
            return std::string{"nothing"};
        };
        CHECK(
            text_of([](auto& sharded) { sharded.forward([] {}); }) ==
            "forward: with Sharding::parameters values are there while the pass uses them; it takes 'use' "
            "last, and calls 'auto const held = use(i);' before it reads value i"
        );
        CHECK(
            text_of([](auto& sharded) {
                sharded.forward([](auto use) {
                    static_cast<void>(use(2));
                    static_cast<void>(use(1));
                });
            }) ==
            "the forward pass is past unit 1 (parameters 1 to 1), but uses it again: units come in ascending "
            "order, once each; where a value is used again, keep what use() returned until then"
        );
        CHECK(
            text_of([](auto& sharded) {
                sharded.forward([](auto) {});
                sharded.backward([](auto, auto use) { static_cast<void>(use(1)); });
            }) ==
            "the backward pass uses unit 1 (parameters 1 to 1) before the gradients of units before it are "
            "ready; mark them before the pass needs the second unit after theirs, and where the backward pass "
            "uses a value early, keep what use() returned in the forward pass (rank 0 did not mark parameter 3)"
        );
        CHECK(text_of([](auto& sharded) {
                  sharded.forward([](auto use) { static_cast<void>(use(4)); });
              }) == "parameter 4 is out of range on rank 0: there are 4 parameters");
        CHECK(
            text_of([](auto& sharded) {
                auto const held = sharded.use_all();
                sharded.forward([](auto) {});
            }) ==
            "what use() or use_all() returned for unit 0 (parameters 0 to 0) is still held; let go of it before "
            "the last pass of its round returns, before skip(), and before the next round begins: a step changes "
            "values"
        );
        CHECK(
            text_of([](auto& sharded) { sharded.prepare_for_forward(); }) ==
            "with Sharding::parameters values are there while a pass uses them; call forward(pass) and "
            "backward(pass)"
        );
        CHECK(
            text_of([](auto& sharded) {
                sharded.forward([](auto) {}, {.will_sync = false});
                sharded.forward([](auto) {});
            }) ==
            "the passes of the previous round have not ended, and all ranks gather values in them; call "
            "backward(), or skip() after a failure"
        );
    });
    over_ranks({1, 2}, [](RankCommunicator& comm) {
        std::vector<StridedParam> params = make({});
        CHECK_THROWS_WITH_AS(
            (ShardedDataParallel{comm, params, Sgd{}, by_units}),
            "the value of parameter 0 cannot be sharded: parameter_traits of its type needs 'static void "
            "set_value(P&, AnyView)' and 'static void release_value(P&)'; or use Sharding::gradients",
            ContractViolation
        );
    });
}

} // namespace
