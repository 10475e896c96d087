// SPDX-License-Identifier: BSL-1.0
// What joined ranks keep in their gradients, and what ranks send of parameters that they do not use.
#include <joinable/bucket/options.hpp>

#include <cstddef>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/linear_model.hpp>
#include <support/recording_communicator.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/participant/action.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/step.hpp>

namespace {

using namespace joinable_tests;
using joinable::DataParallelOptions;
using joinable::DistributedDataParallel;
using joinable::Join;
using joinable::JoinedGradients;
using joinable::participants;
using joinable::UnusedGradients;

using Params = std::vector<Param<double>>;

/// A parameter that cannot be told where its gradient is, and may have none.
struct Fixed {
    std::vector<double> value{0.0};
    std::optional<std::vector<double>> grad;
};

/// One batch that adds `gradient` to parameter 0's.
template <class Ddp>
void train(Ddp& ddp, Params& params, double gradient, joinable::RoundNotice const& notice = {}) {
    ddp.forward([] {}, notice);
    ddp.backward([&](auto ready) {
        params[0].g(0) += gradient;
        ready(0);
    });
}

/// Sees the gradients in its post hook.
template <class Comm>
class Witness {
public:
    Witness(Comm& comm, Params& params) : comm_{comm}, params_{params} {}

    struct Hook {
        Witness& owner;
        static bool takes_part(joinable::Round const&) { return false; }
        void main_hook() {}
        void post_hook(bool) { owner.seen = owner.params_[0].g(0); }
    };
    Hook join_hook(joinable::arguments<joinable::keywords<>> const&) { return {*this}; }
    Comm& join_communicator() { return comm_; }
    joinable::JoinState& join_state() { return state_; }

    double seen = -1;

private:
    Comm& comm_;
    Params& params_;
    joinable::JoinState state_;
};

TEST_CASE("a rank that joined begins the next guard as the others, where zeros come after the step"
) {
    for (bool const views : {false, true}) {
        for (bool const stops : {false, true}) {
            over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
                Params params = make_params<double>({1});
                DistributedDataParallel ddp{comm, params, {.gradient_as_bucket_view = views}};
                for (int epoch = 0; epoch < 3; ++epoch) {
                    Witness witness{comm, params};
                    Join guard{participants(witness, ddp)};
                    for (int i = 0; guard.next(i < 2 + comm.rank()); ++i) {
                        train(ddp, params, 1.0);
                        double const active = comm.size() - (i < 2 ? 0 : i - 1);
                        CHECK(params[0].g(0) == doctest::Approx(active / comm.size()));
                        params[0].g(0) = 0; // after the step
                        if (stops && i == 2) {
                            guard.vote_stop();
                        }
                    }
                    auto const result = guard.finish();
                    bool const is_last = comm.rank() == comm.size() - 1;
                    bool const has_shadowed = result.shadow_rounds != 0;
                    CHECK(result.stopped_early == (stops && comm.size() > 2));
                    CHECK((witness.seen != 0.0) == has_shadowed); // the last average
                    CHECK((is_last || stops || has_shadowed));
                    CHECK(params[0].g(0) == 0.0);
                }
            });
        }
    }
}

TEST_CASE("what a rank accumulated, and no round reduced, stays in its gradient") {
    over_ranks({1, 2, 4}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        DistributedDataParallel ddp{comm, params};
        Join guard{participants(ddp)};
        train(ddp, params, 1.0);
        params[0].g(0) = 0;
        for (int i = 0; i <= comm.rank(); ++i) {
            train(ddp, params, 5.0, {.will_sync = false});
        }
        CHECK(guard.finish().unsynced_rounds == static_cast<std::size_t>(comm.size()));
        CHECK(params[0].g(0) == 5.0 * (comm.rank() + 1));
    });
}

TEST_CASE("kept averages stay in the gradients of joined ranks") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        DistributedDataParallel ddp{comm, params, {.joined_gradients = JoinedGradients::kept}};
        Join guard{participants(ddp)};
        for (int i = 0; i <= comm.rank(); ++i) {
            params[0].g(0) = 0;
            train(ddp, params, 6.0);
        }
        guard.finish();
        CHECK(params[0].g(0) == doctest::Approx(6.0 / comm.size()));
    });
}

TEST_CASE("a joined rank does not step by an average of an earlier round") {
    for (bool const views : {false, true}) {
        over_ranks({2, 3, 4, 8}, [&](RankCommunicator& comm) {
            Params params = make_params<double>({1, 1});
            DistributedDataParallel ddp{
                comm,
                params,
                {.gradient_as_bucket_view = views, .find_unused = true, .sync_at_end = false}
            };
            joinable::Step step{comm, [&] {
                                    for (auto& param : params) {
                                        param.value[0] -= param.g(0);
                                    }
                                }};
            Join guard{participants(ddp, step)};
            int const inputs = comm.rank() == 0 ? 1 : 4;
            for (int i = 0; i < inputs; ++i) {
                params[0].g(0) = params[1].g(0) = 0;
                bool const uses_both = i % 2 == 0;
                ddp.forward([] {});
                ddp.backward(
                    [&](auto ready) {
                        for (std::size_t p = 0; p < (uses_both ? 2 : 1); ++p) {
                            params[p].g(0) += 1.0;
                            ready(p);
                        }
                    },
                    [&](std::size_t p) { return p == 1 && !uses_both; }
                );
                step.step();
            }
            guard.finish();
            double const fewer = (comm.size() - 1.0) / comm.size();
            CHECK(params[0].value[0] == doctest::Approx(-1.0 - 3 * fewer));
            CHECK(params[1].value[0] == doctest::Approx(-1.0 - fewer));
        });
    }
}

// -- PyTorch's numbers -------------------------------------------------------------------------------

TEST_CASE("untouched: the tutorial's numbers, on the rank that joined too") {
    // Inputs 5 and 6, gradient 1 per input, gradients not zeroed: rank 0 keeps 5, rank 1 ends with
    // (5 + 1) / 2 or (5 + 1) / 1. With more ranks, rank r has 5 + r inputs.
    for (bool const views : {false, true}) {
        for (bool const by_initial : {true, false}) {
            for (std::size_t const count : {1U, 5U}) {
                over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
                    Params params = make_params<double>(std::vector<std::size_t>(count, 2));
                    DistributedDataParallel ddp{
                        comm,
                        params,
                        {.bucket_cap_bytes = 16,
                         .gradient_as_bucket_view = views,
                         .joined_gradients = JoinedGradients::untouched}
                    };
                    double expected = 5.0;
                    Join guard{
                        participants(ddp),
                        {.carry_accumulated = false},
                        joinable::divide_by_initial_world_size = by_initial
                    };
                    for (int i = 0; i < 5 + comm.rank(); ++i) {
                        ddp.forward([] {});
                        ddp.backward([&](auto ready) {
                            for (std::size_t p = 0; p < params.size(); ++p) {
                                params[p].g(0) += 1.0;
                                params[p].g(1) += 2.0;
                                ready(p);
                            }
                        });
                        if (i >= 5) { // ranks 0 to i - 5 have joined
                            double const active = comm.size() - (i - 4);
                            expected =
                                (expected + 1.0) * active / (by_initial ? comm.size() : active);
                        }
                    }
                    guard.finish();
                    for (auto const& param : params) {
                        CHECK(param.g(0) == doctest::Approx(expected));
                        CHECK(param.g(1) == doctest::Approx(2 * expected));
                    }
                    if (comm.size() == 2 && comm.rank() == 1) {
                        CHECK(params[0].g(0) == (by_initial ? 3.0 : 6.0));
                    }
                });
            }
        }
    }
}

TEST_CASE("untouched: a rank without inputs needs no gradient to receive anything in") {
    for (JoinedGradients const joined : {JoinedGradients::untouched, JoinedGradients::kept}) {
        over_ranks({2, 3, 4, 8}, [&](RankCommunicator& comm) {
            std::vector<Fixed> params(2);
            DistributedDataParallel ddp{comm, params, {.joined_gradients = joined}};
            auto const run = [&] {
                Join guard{participants(ddp), {.carry_accumulated = false}};
                for (int i = 0; i < 2 * comm.rank(); ++i) {
                    ddp.forward([] {});
                    ddp.backward([&](auto ready) {
                        for (std::size_t p = 0; p < params.size(); ++p) {
                            params[p].grad = std::vector<double>{1.0};
                            ready(p);
                        }
                    });
                }
                guard.finish();
            };
            if (joined == JoinedGradients::kept) {
                CHECK_THROWS(run());
            } else {
                run();
                double const left = comm.size() - comm.rank();
                for (Fixed const& param : params) {
                    CHECK(param.grad.has_value() == (comm.rank() != 0));
                    if (param.grad) {
                        CHECK((*param.grad)[0] == doctest::Approx(left / comm.size()));
                    }
                }
            }
        });
    }
}

TEST_CASE("untouched: joined ranks use the memory that others use, and allocate none as they shadow"
) {
    for (bool const views : {false, true}) {
        over_ranks({2, 4}, [&](RankCommunicator& comm) {
            Params params = make_params<double>({3, 2});
            DistributedDataParallel ddp{
                comm,
                params,
                {.gradient_as_bucket_view = views, .joined_gradients = JoinedGradients::untouched}
            };
            void const* const before = ddp.buckets().front().buffer.data;
            joinable::Action watch{
                comm,
                [] {},
                [&] {
                    joinable::Bucket const& bucket = ddp.buckets().front();
                    CHECK(bucket.buffer.data == before);
                    std::size_t const k = bucket.parameters[0] == 0 ? 0 : 1;
                    CHECK((params[0].grad.data() == bucket.views[k].data()) == views);
                    CHECK(params[0].g(2) == -1.0);
                }
            };
            Join guard{participants(ddp, watch), {.carry_accumulated = false}};
            params[0].g(2) = -1.0;
            for (int i = 0; i < 3 * comm.rank(); ++i) {
                ddp.forward([] {});
                ddp.backward([&](auto ready) {
                    ready(0); // first, so that the rebuilt buckets hold it elsewhere
                    ready(1);
                });
                params[0].g(2) = -1.0;
                watch();
            }
            guard.finish();
        });
    }
}

TEST_CASE("untouched gradients are refused where others would use them, on all ranks") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        DistributedDataParallel ddp{comm, params, {.joined_gradients = JoinedGradients::untouched}};
        joinable::Step step{comm, [] {}};
        auto const text_of = [&](auto const& list, joinable::JoinOptions const& options) {
            try {
                Join guard{list, options};
                return std::string{};
            } catch (joinable::ContractViolation const& error) {
                return std::string{error.what()};
            }
        };
        CHECK(
            text_of(participants(ddp, step), {.carry_accumulated = false})
                .find("a Step or a sharded optimizer beside it would step by old gradients") !=
            std::string::npos
        );
        CHECK(
            text_of(participants(ddp), {}).find("give it {.carry_accumulated = false}") !=
            std::string::npos
        );
        CHECK(text_of(participants(ddp), {.carry_accumulated = false}).empty());
        CHECK(text_of(participants(ddp, step), {.enable = false}).empty());
    });
}

// -- parameters that a pass does not use -------------------------------------------------------------

TEST_CASE("what an unused parameter still holds is sent where the options say so, else zeros") {
    for (UnusedGradients const unused : {UnusedGradients::zero, UnusedGradients::held}) {
        for (bool const views : {false, true}) {
            for (bool const is_static : {false, true}) {
                over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
                    Params params = make_params<double>({1, 1, 1});
                    DistributedDataParallel ddp{
                        comm,
                        params,
                        {.gradient_as_bucket_view = views,
                         .find_unused = !is_static,
                         .static_graph = is_static,
                         .unused_gradients = unused}
                    };
                    for (auto& param : params) {
                        param.g(0) = 8.0; // of earlier times: nobody zeroes it
                    }
                    bool const is_first = comm.rank() == 0;
                    double expected = 8.0;
                    for (int i = 0; i < 3; ++i) { // all use 0, the first rank uses 1, none uses 2
                        auto const pass = [&](auto ready) {
                            params[0].g(0) += 1.0;
                            ready(0);
                            if (is_first) {
                                params[1].g(0) += 1.0;
                                ready(1);
                            }
                        };
                        ddp.forward([] {});
                        if (is_static) {
                            ddp.backward(pass);
                        } else {
                            ddp.backward(pass, [&](std::size_t p) {
                                return p == 2 || (p == 1 && !is_first);
                            });
                        }
                        double const others =
                            unused == UnusedGradients::held ? expected * (comm.size() - 1) : 0.0;
                        expected = (expected + 1.0 + others) / comm.size();
                        CHECK(params[0].g(0) == doctest::Approx(9.0 + i));
                        CHECK(params[1].g(0) == doctest::Approx(expected));
                        CHECK(params[2].g(0) == 8.0);
                    }
                });
            }
        }
    }
}

TEST_CASE("a rank that skips, has joined or has weight 0 sends nothing that it holds") {
    over_ranks({2, 3, 4}, [](RankCommunicator& comm) {
        for (int const kind : {0, 1, 2, 3}) {
            Params params = make_params<double>({1});
            DistributedDataParallel ddp{
                comm,
                params,
                {.find_unused = true,
                 .joined_gradients = JoinedGradients::kept,
                 .unused_gradients = UnusedGradients::held}
            };
            params[0].g(0) = 8.0;
            bool const is_first = comm.rank() == 0;
            Join guard{participants(ddp)};
            if (is_first) {
                train(ddp, params, 1.0, {.weight = 2});
            } else if (kind == 0) {
                ddp.skip();
            } else if (kind == 1) {
                ddp.forward([] {}, {.weight = 0});
                ddp.backward([](auto const&) {}, {0});
            } else if (kind == 2) {
                ddp.forward([] {}, {.weight = 2});
                auto const fail = [](auto const&) { throw std::runtime_error{"a bad sample"}; };
                CHECK_THROWS_AS(ddp.backward(fail), std::runtime_error);
                ddp.skip();
            }
            guard.finish();
            CHECK(params[0].g(0) == (kind == 2 ? 9.0 / comm.size() : 9.0));
        }
    });
}

} // namespace
