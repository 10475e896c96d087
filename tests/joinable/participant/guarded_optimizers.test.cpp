// SPDX-License-Identifier: BSL-1.0
// What a guard refuses of sharded optimizers: one that it does not list, two over one model, and settings that
// ranks have differently.
#include <joinable/participant/sharded/zero_redundancy_optimizer.hpp>

#include <cstddef>
#include <exception>
#include <string>
#include <type_traits>
#include <vector>

#include <doctest/doctest.h>

#include <over_ranks.hpp>
#include <support/gathered_param.hpp>
#include <support/linear_model.hpp>

#include <joinable/detail/text.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/sharded/data_parallel.hpp>
#include <joinable/participant/step.hpp>
#include <joinable/tensor/any_view.hpp>

namespace {

using namespace joinable_tests;
using joinable::Adam;
using joinable::ContractViolation;
using joinable::DistributedDataParallel;
using joinable::Join;
using joinable::participants;
using joinable::Sgd;
using joinable::ShardedDataParallel;
using joinable::ShardedOptions;
using joinable::Sharding;
using joinable::Step;
using joinable::ZeroRedundancyOptimizer;

template <class Model>
void pass(Model& model, std::vector<Param<float>>& params) {
    model.forward([] {});
    model.backward([&](auto ready) {
        for (std::size_t k = params.size(); k-- > 0;) {
            add_gradient(params[k], 1.0);
            ready(k);
        }
    });
}

/// A value and its gradient in the memory of a model, as strided views.
struct ViewParam {
    joinable::AnyView value;
    joinable::AnyView grad;

    ViewParam(
        std::vector<float>& values,
        std::vector<float>& gradients,
        std::size_t offset,
        std::size_t count,
        std::size_t stride
    )
        : value{values.data() + offset, joinable::DType::f32, {count}, {stride}},
          grad{gradients.data() + offset, joinable::DType::f32, {count}, {stride}} {}
};

/// What f() throws: its type and text.
template <class F>
std::string refusal(F const& f) {
    try {
        f();
    } catch (ContractViolation const& error) {
        return error.what();
    } catch (joinable::PeerFailed const& error) {
        return joinable::detail::concat("PeerFailed: ", error.what());
    } catch (std::exception const& error) {
        return joinable::detail::concat("other: ", error.what());
    }
    return "nothing";
}

TEST_CASE("an optimizer that the guard of its communicator does not list is refused on all ranks") {
    for (int const inputs_of_rank_0 : {0, 1, 3}) {
        over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
            CAPTURE(inputs_of_rank_0);
            std::vector<Param<float>> params = make_params<float>({3, 4});
            DistributedDataParallel ddp{comm, params};
            ZeroRedundancyOptimizer zero{comm, params, Sgd{.learning_rate = 1.0}};
            int const inputs = comm.rank() == 0 && comm.size() > 1 ? inputs_of_rank_0 : 3;
            auto const before = params[0].value;
            std::string const text = refusal([&] {
                Join guard{participants(ddp)};
                for (int i = 0; i < inputs; ++i) {
                    pass(ddp, params);
                    zero.step();
                }
                guard.finish();
            });
            std::string const expected =
                "ZeroRedundancyOptimizer is used while its communicator is in a guard that does not list it, so "
                "joined ranks would not follow; add it to the guard's participants(...), or call it after finish()";
            CAPTURE(text);
            CHECK(text.find(expected) != std::string::npos);
            CHECK(text.starts_with(inputs == 0 ? "PeerFailed: rank" : "ZeroRedundancy"));
            CHECK(params[0].value == before); // nothing was stepped
        });
    }
}

TEST_CASE("a model that one rank makes in a guard is refused on all ranks, joined ones too") {
    for (int const rounds_of_rank_0 : {0, 1, 3}) {
        over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
            CAPTURE(rounds_of_rank_0);
            std::vector<Param<float>> params = make_params<float>({3, 4});
            std::vector<Param<float>> others = make_params<float>({3, 4});
            auto const check = [&](std::string const& name, auto const& make) {
                DistributedDataParallel ddp{comm, params};
                std::string const text = refusal([&] {
                    Join guard{participants(ddp)};
                    for (int i = 0; i < rounds_of_rank_0 && comm.rank() == 0; ++i) {
                        pass(ddp, params);
                    }
                    if (comm.rank() == 0) {
                        make();
                    }
                    guard.finish();
                });
                CAPTURE(text);
                CHECK(
                    text.find(
                        name +
                        " that is made is used while its communicator is in a guard that does not list it"
                    ) != std::string::npos
                );
                CHECK(text.starts_with(comm.rank() == 0 ? "a " : "PeerFailed: rank 0"));
            };
            check("a DistributedDataParallel", [&] {
                DistributedDataParallel const ddp{comm, others};
            });
            check("a sharded optimizer", [&] {
                ZeroRedundancyOptimizer const zero{comm, others, Sgd{}};
            });
            check("a sharded optimizer", [&] {
                ShardedDataParallel const sharded{comm, others, Sgd{}};
            });
        });
    }
}

TEST_CASE(
    "what a part of a listed participant calls is followed by joined ranks, so it is no stranger"
) {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        std::vector<Param<float>> params = make_params<float>({3, 4});
        DistributedDataParallel ddp{comm, params};
        ZeroRedundancyOptimizer zero{comm, params, Sgd{.learning_rate = 1.0}};
        Step step{comm, [&] { zero.step(); }};
        {
            Join guard{participants(ddp, step)};
            for (int i = 0; i < 1 + comm.rank(); ++i) {
                pass(ddp, params);
                step.step();
            }
            guard.finish();
            zero.step(); // after finish() its communicator is in no guard
        }
        zero.step();
    });
}

TEST_CASE("what gathers state is refused where a guard has the communicator") {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        std::vector<Param<float>> params = make_params<float>({3, 4});
        DistributedDataParallel ddp{comm, params};
        ZeroRedundancyOptimizer zero{comm, params, Sgd{}};
        std::string const text = refusal([&] {
            Join guard{participants(ddp)};
            zero.consolidate();
        });
        CHECK(
            text.find("consolidate() is used while its communicator is in a guard") !=
            std::string::npos
        );
    });
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        std::vector<Param<float>> params = make_params<float>({3, 4});
        ZeroRedundancyOptimizer zero{comm, params, Sgd{}, {.reduces_gradients = true}};
        DistributedDataParallel other{comm, params};
        std::string const text = refusal([&] {
            Join guard{participants(zero)};
            other.forward([] {});
        });
        CHECK(
            text.find("DistributedDataParallel is used while its communicator is in a guard") !=
            std::string::npos
        );
    });
}

TEST_CASE("a model that a guard does not list evaluates and accumulates, which sends nothing") {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        std::vector<Param<float>> params = make_params<float>({3, 4});
        std::vector<Param<float>> others = make_params<float>({3, 4});
        DistributedDataParallel ddp{comm, params};
        DistributedDataParallel other{comm, others};
        Join guard{participants(ddp)};
        for (int round = 0; round <= comm.rank(); ++round) {
            pass(ddp, params);
            CHECK(other.forward([] { return 7; }, {.phase = joinable::Phase::evaluate}) == 7);
            auto const held = other.no_sync();
            pass(other, others);
        }
        guard.finish();
        CHECK(others[0].g(0) == static_cast<float>(comm.rank() + 1));
    });
}

TEST_CASE("two optimizers that step one parameter in one guard are refused at its entry") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        std::vector<Param<float>> params = make_params<float>({0, 3, 2, 4});
        params[2].name = "fc.weight";
        params[3].name = "fc.bias";
        params[1].requires_grad = false; // nobody steps it
        std::vector<Param<float>*> const some{&params[1], &params[2], &params[3]};
        DistributedDataParallel ddp{comm, params};
        ZeroRedundancyOptimizer zero{comm, params, Sgd{}};
        ZeroRedundancyOptimizer other{comm, some, Adam{}};
        std::string const both =
            "participant 1 (ZeroRedundancyOptimizer) and participant 2 (ZeroRedundancyOptimizer) both step ";
        std::string const twice =
            ", so it would be stepped twice in a round; give each parameter to one of them";
        CHECK(
            refusal([&] { Join{participants(ddp, zero, other)}.finish(); }) ==
            both + "parameter 2 (fc.weight), which is parameter 1 (fc.weight) of the second one" +
                twice
        );
        ZeroRedundancyOptimizer group{comm, some, Sgd{}};
        CHECK(refusal([&] {
                  Join{participants(ddp, group, other)}.finish();
              }) == both + "parameter 1 (fc.weight)" + twice);
        Join guard{participants(ddp, other)}; // nothing stays attached
        guard.finish();
    });
}

TEST_CASE("two participants that average one parameter are refused at the guard's entry") {
    std::string const averaged_twice =
        ", so it would be averaged twice in a round; let one participant average it: a DistributedDataParallel "
        "over both models, without ZeroOptions::reduces_gradients beside it";
    over_ranks({1, 2, 3, 4}, [&](RankCommunicator& comm) {
        std::vector<Param<float>> params = make_params<float>({3, 2});
        params[0].name = "encoder";
        params[1].name = "head";
        std::vector<Param<float>*> const encoder{&params[0]};
        std::vector<Param<float>*> const head{&params[1]};
        DistributedDataParallel ddp{comm, params};
        DistributedDataParallel other{comm, head};
        CHECK(
            refusal([&] { Join{participants(ddp, other)}.finish(); }) ==
            "participant 0 (DistributedDataParallel) and participant 1 (DistributedDataParallel) both average "
            "parameter 1 (head), which is parameter 0 (head) of the second one" +
                averaged_twice
        );
        for (Sharding const sharding : {Sharding::none, Sharding::optimizer, Sharding::gradients}) {
            ShardedDataParallel sharded{comm, encoder, Sgd{}, ShardedOptions{.sharding = sharding}};
            CHECK(
                refusal([&] { Join{participants(sharded, ddp)}.finish(); }) ==
                "participant 0 (ShardedDataParallel) and participant 1 (DistributedDataParallel) both average "
                "parameter 0 (encoder)" +
                    averaged_twice
            );
            Join{participants(sharded, other)}.finish(); // each has parameters of its own
        }
        std::vector<CopyingParam> in_parts;
        in_parts.emplace_back(3);
        in_parts[0].grad = {};
        DistributedDataParallel whole{comm, in_parts};
        ShardedDataParallel parts{
            comm, in_parts, Sgd{}, ShardedOptions{.sharding = Sharding::parameters}
        };
        CHECK( // neither its value nor its gradient is in memory
            refusal([&] { Join{participants(parts, whole)}.finish(); }) ==
            "participant 0 (ShardedDataParallel) and participant 1 (DistributedDataParallel) both average "
            "parameter 0" +
                averaged_twice
        );
        ZeroRedundancyOptimizer zero{comm, encoder, Sgd{}, {.reduces_gradients = true}};
        zero.add_parameter_group(head, Sgd{});
        CHECK(
            refusal([&] { Join{participants(zero, other)}.finish(); }) ==
            "participant 0 (DistributedDataParallel) and participant 1 (ZeroRedundancyOptimizer) both average "
            "parameter 0 (head), which is parameter 1 (head) of the second one" +
                averaged_twice
        );
    });
}

TEST_CASE("views that overlap are one parameter, and only ranks where they do see it themselves") {
    over_ranks({2, 3, 4}, [&](RankCommunicator& comm) {
        std::vector<float> values(5);
        std::vector<float> gradients(5);
        bool const overlaps = comm.rank() == 1;
        std::vector<ViewParam> first{{values, gradients, 0, 2, 2}}; // elements 0 and 2
        std::vector<ViewParam> second{{values, gradients, overlaps ? 2U : 1U, 2, 2}};
        DistributedDataParallel ddp{comm, first};
        DistributedDataParallel other{comm, second};
        std::string const text = refusal([&] { Join{participants(ddp, other)}.finish(); });
        CAPTURE(text);
        CHECK(
            text.find("both average parameter 0, so it would be averaged twice") !=
            std::string::npos
        );
        CHECK(text.starts_with(overlaps ? "participant 0" : "PeerFailed: rank 1"));
        std::vector<float> own(2); // the values differ, the gradients do not
        std::vector<ViewParam> third{{values, gradients, 0, 2, 1}};
        third[0].value = joinable::AnyView{own};
        DistributedDataParallel last{comm, third};
        CHECK(refusal([&] {
                  Join{participants(ddp, last)}.finish();
              }).find("both average parameter 0") != std::string::npos);
        Join{participants(ddp)}.finish();
    });
}

TEST_CASE("two optimizers with parameters of their own train in one guard") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        std::vector<Param<float>> params = make_params<float>({3, 4});
        std::vector<Param<float>*> const first{&params[0]};
        std::vector<Param<float>*> const second{&params[1]};
        DistributedDataParallel ddp{comm, params};
        ZeroRedundancyOptimizer zero{comm, first, Sgd{.learning_rate = 1.0}};
        ZeroRedundancyOptimizer other{comm, second, Sgd{.learning_rate = 2.0}};
        Join guard{participants(ddp, zero, other)};
        for (int i = 0; i < 2; ++i) {
            for (Param<float>& param : params) {
                param.storage.assign(param.storage.size(), 0.0F);
            }
            pass(ddp, params);
            zero.step();
            other.step();
        }
        guard.finish();
        CHECK(params[0].value == std::vector<float>(3, -2.0F));
        CHECK(params[1].value == std::vector<float>(4, -4.0F));
    });
}

TEST_CASE("settings that were changed differently are named when the next guard begins") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        std::vector<Param<float>> params = make_params<float>({3});
        DistributedDataParallel ddp{comm, params};
        ZeroRedundancyOptimizer zero{comm, params, Adam{.learning_rate = 1e-3}};
        if (comm.rank() == 0) {
            zero.rule().learning_rate = 1e-2;
        }
        std::string text;
        try {
            Join guard{participants(ddp, zero)};
            guard.finish();
        } catch (joinable::Mismatch const& error) {
            text = error.what();
        }
        CHECK(
            text.find("(ZeroRedundancyOptimizer): learning_rate: rank 0 has 0.01, rank") !=
            std::string::npos
        );
    });
}

enum class Way { notification, next, look_ahead, known };

/// Trains `inputs` rounds. `set(round)` sets the rates before the step of each.
template <class Model, class Step, class Set>
void train(
    Model& model,
    Step& stepper,
    std::vector<Param<float>>& params,
    Way way,
    std::size_t inputs,
    Set const& set
) {
    std::vector<std::size_t> rounds;
    for (std::size_t k = 0; k < inputs; ++k) {
        rounds.push_back(k);
    }
    auto const round = [&](std::size_t k) {
        pass(model, params);
        set(k);
        stepper.step();
    };
    joinable::JoinOptions options;
    if (way == Way::known) {
        options.inputs = inputs;
    }
    auto const loop = [&](auto&& guard) {
        if (way == Way::next) {
            for (std::size_t const k : guard.iterate(rounds)) {
                round(k);
            }
        } else if (way == Way::look_ahead) {
            for (std::size_t const k : guard.iterate(joinable::look_ahead, rounds)) {
                round(k);
            }
        } else {
            for (std::size_t const k : rounds) {
                round(k);
            }
        }
        guard.finish();
    };
    if constexpr (std::is_same_v<Model, Step>) {
        loop(Join{participants(model), options});
    } else {
        loop(Join{participants(model, stepper), options});
    }
}

/// The text of the Mismatch that f() throws.
template <class F>
std::string mismatch_of(F const& f) {
    try {
        f();
    } catch (joinable::Mismatch const& error) {
        return error.what();
    } catch (std::exception const& error) {
        return std::string{"other: "} + error.what();
    }
    return "nothing";
}

TEST_CASE(
    "settings that ranks have stepped by differently are named on all ranks, one roll call later"
) {
    std::string const why =
        "; ranks have stepped by them, so values are mixed: go on from a checkpoint, with the "
        "same settings on every rank";
    for (Way const way : {Way::notification, Way::next, Way::look_ahead, Way::known}) {
        over_ranks({2, 3, 4}, [&](RankCommunicator& comm) {
            CAPTURE(static_cast<int>(way));
            bool const is_last = comm.rank() == comm.size() - 1;
            std::size_t last_round = 0;
            {
                std::vector<Param<float>> params = make_params<float>({3, 2});
                DistributedDataParallel ddp{comm, params};
                ZeroRedundancyOptimizer zero{comm, params, Sgd{.learning_rate = 1}};
                std::string const text = mismatch_of([&] {
                    train(ddp, zero, params, way, 6, [&](std::size_t k) {
                        last_round = k;
                        zero.rule().learning_rate = k == 2 && is_last ? 0.5 : 1; // its own plateau
                    });
                });
                CAPTURE(text);
                CHECK(text.ends_with(why));
                bool const is_late = way == Way::look_ahead || way == Way::known;
                CHECK(last_round == (way == Way::known ? 5 : way == Way::look_ahead ? 3 : 2));
                // Later settings may be equal again; then the text says that earlier ones were not.
                CHECK(text.starts_with(
                    is_late ? "settings differ: hash over all steps of this guard: rank 0 has "
                            : "settings differ: learning_rate: rank 0 has 1, rank "
                ));
            }
            for (Sharding const sharding :
                 {Sharding::none, Sharding::optimizer, Sharding::gradients}) {
                std::vector<Param<float>> params = make_params<float>({3, 2});
                std::vector<Param<float>*> first{&params[0]};
                std::vector<Param<float>*> second{&params[1]};
                ShardedDataParallel sharded{
                    comm, first, Sgd{.learning_rate = 1}, ShardedOptions{.sharding = sharding}
                };
                sharded.add_parameter_group(second, Sgd{.learning_rate = 1});
                std::string const text = mismatch_of([&] {
                    train(sharded, sharded, params, way, 2, [&](std::size_t k) {
                        sharded.rule(1).learning_rate = k == 1 && comm.rank() == 0 ? 2 : 1;
                    });
                });
                CAPTURE(text); // only the end of the guard can tell
                CHECK(text.starts_with(
                    "settings of group 1 differ: learning_rate: rank 0 has 2, rank 1 has 1"
                ));
            }
        });
    }
}

TEST_CASE("settings that change equally on all ranks are no difference") {
    for (Way const way : {Way::notification, Way::next, Way::look_ahead, Way::known}) {
        over_ranks({1, 2, 3, 4}, [&](RankCommunicator& comm) {
            CAPTURE(static_cast<int>(way));
            std::vector<Param<float>> params = make_params<float>({3, 2});
            DistributedDataParallel ddp{comm, params};
            ZeroRedundancyOptimizer zero{comm, params, Sgd{.learning_rate = 1}};
            double rate = 1;
            for (int guard = 0; guard < 2; ++guard) {
                std::size_t const inputs = 2 + static_cast<std::size_t>(comm.rank());
                std::string const text = mismatch_of([&] {
                    train(ddp, zero, params, way, inputs, [&](std::size_t k) {
                        // Once ranks have joined, those of the lowest active rank count.
                        bool const is_own = k >= 2 && comm.rank() == comm.size() - 1;
                        zero.rule().learning_rate = (rate *= 0.5) + (is_own ? 1 : 0);
                    });
                });
                CHECK(text == "nothing");
                rate = 1;
                zero.rule().learning_rate = 1;
            }
        });
    }
}

TEST_CASE("what is out of turn names the member that was called, and the order of the round") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        std::vector<Param<float>> params = make_params<float>({3});
        DistributedDataParallel ddp{comm, params};
        ZeroRedundancyOptimizer zero{comm, params, Sgd{}};
        std::string const order =
            "; the order of such a round is forward() or skip() of participant 0 "
            "(DistributedDataParallel), then step() of participant 1 "
            "(ZeroRedundancyOptimizer)";
        // Ranks that are not here yet hear of the violation of another one, with its text.
        auto const says = [](std::string const& text, std::string const& part) {
            CAPTURE(text);
            CHECK(text.find(part) != std::string::npos);
        };
        says(
            refusal([&] {
                Join guard{participants(ddp, zero)};
                zero.step();
            }),
            "participant 1 (ZeroRedundancyOptimizer) called step() first in round 0, but the first one in hook "
            "order is participant 0 (DistributedDataParallel)" +
                order
        );
    });
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        std::vector<Param<float>> params = make_params<float>({3});
        DistributedDataParallel ddp{comm, params};
        ZeroRedundancyOptimizer zero{comm, params, Sgd{}};
        std::string const text = refusal([&] {
            Join guard{participants(ddp, zero)};
            pass(ddp, params);
            pass(ddp, params); // zero.step() was forgotten
        });
        CAPTURE(text);
        CHECK(
            text.find(
                "participant 0 (DistributedDataParallel) called forward() or skip() in round 0, but "
                "the next one in hook order is participant 1 (ZeroRedundancyOptimizer); the order of "
                "such a round is forward() or skip() of participant 0"
            ) != std::string::npos
        );
    });
}

} // namespace
