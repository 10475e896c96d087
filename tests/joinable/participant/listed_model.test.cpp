// SPDX-License-Identifier: BSL-1.0
// Parameters that changed after a model was made: what each training forward compares.
#include <joinable/participant/detail/model_checks.hpp>

#include <cstddef>
#include <exception>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>

#include <over_ranks.hpp>
#include <support/gathered_param.hpp>

#include <joinable/error.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/sharded/data_parallel.hpp>
#include <joinable/participant/step.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/dtype.hpp>

namespace {

using namespace joinable_tests;
using joinable::AnyView;
using joinable::ContractViolation;
using joinable::DataParallelOptions;
using joinable::DistributedDataParallel;
using joinable::DType;
using joinable::Join;
using joinable::participants;
using joinable::PeerFailed;
using joinable::ShardedDataParallel;
using joinable::ShardedOptions;
using joinable::Sharding;
using joinable::Step;

/// A parameter whose dtype and device an engine may change in place.
struct Weight {
    AnyView value;
    AnyView grad;
    bool requires_grad = true;
    std::string name;
};

struct Model {
    std::vector<float> values = std::vector<float>(5, 1.0F);
    std::vector<float> gradients = std::vector<float>(5);
    std::vector<Weight> weights{
        {view(values, 0, 3), view(gradients, 0, 3), false, "backbone"},
        {view(values, 3, 2), view(gradients, 3, 2), true, "head"}
    };

    static AnyView view(std::vector<float>& numbers, std::size_t from, std::size_t count) {
        return {numbers.data() + from, DType::f32, {count}, {1}};
    }
};

template <class Ddp>
void pass(Ddp& ddp, Model& model, joinable::RoundNotice const& notice = {}) {
    ddp.forward([] {}, notice);
    ddp.backward([&](auto ready) {
        for (std::size_t i = model.weights.size(); i-- > 0;) {
            if (model.weights[i].requires_grad) {
                ready(i);
            }
        }
    });
}

/// What f() throws: its type and text.
std::string thrown_by(std::function<void()> const& f) {
    try {
        f();
    } catch (ContractViolation const& error) {
        return error.what();
    } catch (PeerFailed const& error) {
        return std::string{"PeerFailed: "} + error.what();
    } catch (std::exception const& error) {
        return std::string{"other: "} + error.what();
    }
    return "nothing";
}

char const* const unfrozen =
    "parameter 0 (backbone) requires a gradient now, but did not when the DistributedDataParallel was made, so it "
    "would not be averaged; make the DistributedDataParallel after unfreezing, or call refresh()";

enum class Way { notification, next, look_ahead, known, disabled, outside };

/// Two rounds, before the second of which `change` changes the model.
template <class Ddp>
void train(Ddp& ddp, Model& model, Way way, std::function<void()> const& change) {
    auto const round = [&](int k) {
        if (k == 1) {
            change();
        }
        pass(ddp, model);
    };
    std::vector<int> const rounds{0, 1};
    if (way == Way::outside) {
        for (int const k : rounds) {
            round(k);
        }
        return;
    }
    joinable::JoinOptions options;
    options.enable = way != Way::disabled;
    if (way == Way::known) {
        options.inputs = 2;
    }
    Join guard{participants(ddp), options};
    if (way == Way::next) {
        for (int const k : guard.iterate(rounds)) {
            round(k);
        }
    } else if (way == Way::look_ahead) {
        for (int const k : guard.iterate(joinable::look_ahead, rounds)) {
            round(k);
        }
    } else {
        for (int const k : rounds) {
            round(k);
        }
    }
    guard.finish();
}

TEST_CASE("a parameter that is unfrozen after the model was made is refused on all ranks") {
    for (Way const way :
         {Way::notification, Way::next, Way::look_ahead, Way::known, Way::disabled, Way::outside}) {
        for (bool const on_all : {true, false}) {
            over_ranks({1, 2, 3}, [&](RankCommunicator& comm) {
                CAPTURE(static_cast<int>(way));
                CAPTURE(on_all);
                Model model;
                DistributedDataParallel ddp{comm, model.weights};
                bool const changes = on_all || comm.rank() == comm.size() - 1;
                std::string const text = thrown_by([&] {
                    train(ddp, model, way, [&] { model.weights[0].requires_grad = changes; });
                });
                CAPTURE(text);
                CHECK(text.find(unfrozen) != std::string::npos);
                bool const sees = text.starts_with("parameter");
                CHECK((sees || text.starts_with("PeerFailed: rank")));
                CHECK((sees == changes || on_all)); // another rank may be faster
            });
        }
    }
}

TEST_CASE("after a refused forward between rounds the communicator is usable") {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        Model model;
        DistributedDataParallel ddp{comm, model.weights};
        bool const changes = comm.rank() == 0;
        auto const unfreeze = [&] { model.weights[0].requires_grad = changes; };
        CHECK(thrown_by([&] { train(ddp, model, Way::notification, unfreeze); }) != "nothing");
        model.weights[0].requires_grad = true;
        DistributedDataParallel again{comm, model.weights};
        Join guard{participants(again)};
        pass(again, model);
        guard.finish();
    });
}

TEST_CASE("a value with another dtype, other extents or another device is refused by name") {
    struct Change {
        std::function<void(Model&)> change;
        std::string_view text;
    };
    std::vector<Change> const changes{
        {[](Model& model) {
             model.weights[1].value = {model.values.data() + 3, DType::f16, {2}, {1}};
             model.weights[1].grad = {model.gradients.data() + 3, DType::f16, {2}, {1}};
         },
         "parameter 1 (head) is f16 (2) now, but was f32 (2) when the DistributedDataParallel was made; make the "
         "DistributedDataParallel after to(), or call refresh()"},
        {[](Model& model) {
             model.weights[0].value = {// a frozen one is sent when the guard ends
                                       model.values.data(),
                                       DType::f32,
                                       {3},
                                       {1},
                                       {joinable::DeviceKind::cuda, 1}
             };
         },
         "parameter 0 (backbone) is f32 (3) on CUDA device 1 now, but was f32 (3) on the host when the "
         "DistributedDataParallel was made; make the DistributedDataParallel after to(), or call refresh()"
        },
        {[](Model& model) {
             model.weights[1].value = {model.values.data() + 3, DType::f32, {1}, {1}};
             model.weights[1].grad = {model.gradients.data() + 3, DType::f32, {1}, {1}};
         },
         "parameter 1 (head) is f32 (1) now, but was f32 (2) when the DistributedDataParallel was made; make the "
         "DistributedDataParallel after resizing, or call refresh()"},
        {[](Model& model) {
             model.weights[1].value = {model.values.data() + 3, DType::f32, {2, 1}, {1, 1}};
             model.weights[1].grad = {model.gradients.data() + 3, DType::f32, {2, 1}, {1, 1}};
         },
         "parameter 1 (head) is f32 (2, 1) now, but was f32 (2)"},
    };
    for (Change const& change : changes) {
        over_ranks({1, 2, 3}, [&](RankCommunicator& comm) {
            Model model;
            DistributedDataParallel ddp{comm, model.weights};
            std::string const text = thrown_by([&] {
                train(ddp, model, Way::notification, [&] {
                    if (comm.rank() == 0) {
                        change.change(model);
                    }
                });
            });
            CAPTURE(text);
            CHECK(text.find(change.text) != std::string::npos);
            CHECK(text.starts_with("PeerFailed") == (comm.rank() != 0));
        });
    }
}

TEST_CASE("a value may move within its device, and a value that is not there is not compared") {
    over_ranks({1, 2}, [](RankCommunicator& comm) {
        Model model;
        DistributedDataParallel ddp{comm, model.weights, {.sync_at_end = false}};
        std::vector<float> other(5, 1.0F);
        Join guard{participants(ddp)};
        pass(ddp, model);
        model.weights[1].value = Model::view(other, 3, 2);
        model.weights[0].value = {};
        pass(ddp, model);
        guard.finish();
    });
    std::vector<Weight> listed(1);
    joinable::detail::ListedModel const model{joinable::parameters(listed), true};
    std::vector<float> value(3);
    listed[0].value = AnyView{value};
    CHECK_NOTHROW(model.require_same("DistributedDataParallel", true));
}

TEST_CASE("an evaluation and a skipped round compare nothing") {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        for (bool const handles : {false, true}) {
            Model model;
            DistributedDataParallel ddp{comm, model.weights};
            Join guard{participants(ddp)};
            pass(ddp, model);
            model.weights[0].requires_grad = true;
            joinable::RoundNotice const evaluation{.phase = joinable::Phase::evaluate};
            if (handles) { // the failure, and goes on
                CHECK(thrown_by([&] { pass(ddp, model); }).find(unfrozen) != std::string::npos);
            }
            model.weights[0].requires_grad = false;
            pass(ddp, model);
            model.weights[0].requires_grad = true;
            ddp.forward([] {}, evaluation);
            ddp.skip();
            guard.finish();
        }
        Model model;
        DistributedDataParallel ddp{comm, model.weights};
        Join guard{participants(ddp)};
        model.weights[0].requires_grad = true;
        guard.next(true, {.phase = joinable::Phase::evaluate});
        ddp.forward([] {}); // next() said that it is an evaluation
        guard.finish();
    });
}

TEST_CASE("with find_unused a parameter that is frozen now counts as unused") {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        for (bool const marks : {false, true}) {
            Model model;
            model.weights[0].requires_grad = true;
            DistributedDataParallel ddp{comm, model.weights, {.find_unused = true}};
            int stepped = 0;
            Step step{comm, [&](joinable::Round const&) { ++stepped; }};
            Join guard{participants(ddp, step)};
            for (int round = 0; round < 3; ++round) {
                model.weights[0].requires_grad = round == 0;
                model.gradients.assign(5, static_cast<float>(comm.rank() + 1));
                ddp.forward([] {});
                ddp.backward([&](auto ready) {
                    ready(1);
                    if (marks || round == 0) {
                        ready(0);
                    }
                });
                step.step();
                float const average = static_cast<float>(comm.size() + 1) / 2;
                float const own = static_cast<float>(comm.rank() + 1);
                CHECK(model.gradients[0] == (round == 0 ? average : own)); // nobody sent it
                CHECK(model.gradients[4] == average);
            }
            guard.finish();
            CHECK(stepped == 3);
        }
    });
}

TEST_CASE(
    "a parameter frozen after rounds that were not reduced is averaged, whether it is marked or not"
) {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        for (bool const marks : {false, true}) {
            Model model;
            model.weights[0].requires_grad = true;
            DistributedDataParallel ddp{comm, model.weights, {.find_unused = true}};
            Join guard{participants(ddp)};
            for (int round = 0; round < 3; ++round) {
                model.weights[0].requires_grad = round == 0;
                if (round != 1) { // round 0 accumulates for round 1
                    model.gradients.assign(5, static_cast<float>(comm.rank() + 1));
                }
                ddp.forward([] {}, {.will_sync = round != 0});
                ddp.backward([&](auto ready) {
                    if (marks || round == 0) {
                        ready(0);
                    }
                    ready(1);
                });
                float const average = static_cast<float>(comm.size() + 1) / 2;
                float const own = static_cast<float>(comm.rank() + 1);
                CHECK(
                    model.gradients[0] == (round == 1 ? average : own)
                ); // in round 2 nobody sends it
                CHECK(model.gradients[4] == (round == 0 ? own : average));
            }
            guard.finish();
        }
    });
}

TEST_CASE("without find_unused a parameter that is frozen now is named, with what to do") {
    for (bool const is_static : {false, true}) {
        over_ranks({1, 2, 3}, [&](RankCommunicator& comm) {
            Model model;
            model.weights[0].requires_grad = true;
            DistributedDataParallel ddp{comm, model.weights, {.static_graph = is_static}};
            std::string const text = thrown_by([&] {
                train(ddp, model, Way::next, [&] { model.weights[0].requires_grad = false; });
            });
            CAPTURE(text);
            CHECK(
                text.find(
                    is_static
                        ? "parameters that were in the first iteration are frozen now, but with static_graph"
                        : "parameters that were trained when they were listed are frozen now, so not all "
                          "gradients became ready; turn the option find_unused on, if the model has it, or list them again: by "
                          "refresh() of a model that has it, else in a new one (rank"
                ) != std::string::npos
            );
            CHECK(
                (is_static || text.find("did not mark parameter 0 (backbone)") != std::string::npos)
            );
        });
    }
}

TEST_CASE("a sharded model compares its parameters in the same way, those of all groups") {
    for (Sharding const sharding : {Sharding::none, Sharding::optimizer, Sharding::gradients}) {
        over_ranks({1, 2, 3}, [&](RankCommunicator& comm) {
            Model model;
            Model second;
            second.weights[0].name = "neck";
            ShardedDataParallel sharded{
                comm, model.weights, joinable::Sgd{}, ShardedOptions{.sharding = sharding}
            };
            sharded.add_parameter_group(second.weights, joinable::Sgd{});
            std::string const text = thrown_by([&] {
                Join guard{participants(sharded)};
                for (int round = 0; round < 2; ++round) {
                    second.weights[0].requires_grad = round == 1 && comm.rank() == 0;
                    sharded.forward([] {});
                    sharded.backward([](auto ready) {
                        ready(3);
                        ready(1);
                    });
                    sharded.step();
                }
                guard.finish();
            });
            CAPTURE(text);
            CHECK(text.ends_with(
                "parameter 2 (neck) requires a gradient now, but did not when the ShardedDataParallel was made, so "
                "it would not be averaged; make the ShardedDataParallel after unfreezing, or call refresh()"
            ));
        });
    }
}

TEST_CASE("a model whose values are sharded, too, compares which parameters are trained") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        std::vector<CopyingParam> params;
        params.emplace_back(2);
        params.emplace_back(3);
        params[1].requires_grad = false;
        ShardedDataParallel sharded{
            comm, params, joinable::Sgd{}, ShardedOptions{.sharding = Sharding::parameters}
        };
        std::string const text = thrown_by([&] {
            Join guard{participants(sharded)};
            for (int round = 0; round < 2; ++round) {
                params[1].requires_grad = round == 1 && comm.rank() == 0;
                sharded.forward([](auto const& use) { static_cast<void>(use(0)); });
                sharded.backward([](auto ready, auto const& use) {
                    static_cast<void>(use(0));
                    ready(0);
                });
                sharded.step();
            }
            guard.finish();
        });
        CAPTURE(text);
        CHECK(text.ends_with( // refresh() refuses such a model
            "parameter 1 requires a gradient now, but did not when the ShardedDataParallel was made, so it would "
            "not be averaged; make the ShardedDataParallel after unfreezing"
        ));
    });
}

} // namespace
