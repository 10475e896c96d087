// SPDX-License-Identifier: BSL-1.0
// What a guard refuses of sharded optimizers: one that it does not list, two over one model, and settings that
// ranks have differently.
#include <joinable/participant/zero_redundancy_optimizer.hpp>

#include <cstddef>
#include <exception>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <over_ranks.hpp>
#include <support/linear_model.hpp>

#include <joinable/detail/text.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/step.hpp>

namespace {

using namespace joinable_tests;
using joinable::Adam;
using joinable::ContractViolation;
using joinable::DistributedDataParallel;
using joinable::Join;
using joinable::participants;
using joinable::Sgd;
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
        std::string const text =
            "two sharded optimizers of this guard step parameter 1 (fc.weight), so it would "
            "be stepped twice in a round; give each parameter to one of them";
        CHECK(refusal([&] { Join{participants(ddp, zero, other)}.finish(); }) == text);
        ZeroRedundancyOptimizer group{comm, some, Sgd{}};
        CHECK(refusal([&] { Join{participants(ddp, group, other)}.finish(); }) == text);
        Join guard{participants(ddp, other)}; // nothing stays attached
        guard.finish();
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
