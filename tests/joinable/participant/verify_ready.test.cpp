// SPDX-License-Identifier: BSL-1.0
// verify_ready of models and of sharded models: a gradient that still changes after ready(i) is named, where
// the buckets would have been summed without its last part.
#include <joinable/participant/data_parallel.hpp>

#include <cstddef>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/gathered_param.hpp>
#include <support/linear_model.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/participant/sharded/data_parallel.hpp>
#include <joinable/tensor/strided_view.hpp>

namespace {

/// A parameter whose gradient is released when it is ready.
struct ReleasingParam : joinable_tests::Param<double> {
    using Param::Param;
};

} // namespace

template <>
struct joinable::parameter_traits<ReleasingParam>
    : joinable::parameter_traits<joinable_tests::Param<double>> {
    static void release_grad(ReleasingParam& p) { p.grad = {}; }
};

namespace {

using namespace joinable_tests;
using joinable::DistributedDataParallel;
using joinable::Join;
using joinable::participants;

/// Where a pass adds to gradient 1 once more.
enum class Late { never, after_its_ready, after_the_last_ready };

inline constexpr auto no_use = [](std::size_t) { return 0; };

/// Its value may have been released; a gradient that has been is made anew.
template <class P>
void add_late(P& param) {
    if (!param.grad) {
        add_gradient(param, 0);
    }
    param.g(0) += 1;
}
/// Each rank adds its number plus one to every element.
template <class P>
void pass(std::vector<P>& params, int rank, Late late, auto const& ready, auto const& use) {
    for (std::size_t p = params.size(); p-- > 0;) {
        [[maybe_unused]] auto const held = use(p);
        add_gradient(params[p], rank + 1);
        ready(p);
        if (p == 1 && late == Late::after_its_ready) {
            add_late(params[p]);
        }
    }
    if (late == Late::after_the_last_ready) {
        add_late(params[1]);
    }
}

TEST_CASE("with verify_ready a gradient that changes after ready is named, on all ranks") {
    for (bool const is_view : {false, true}) {
        for (Late const late : {Late::after_its_ready, Late::after_the_last_ready}) {
            over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
                auto params = make_params<double>({3, 1, 5});
                params[1].name = "bias";
                DistributedDataParallel ddp{
                    comm, params, {.gradient_as_bucket_view = is_view, .verify_ready = true}
                };
                int const culprit = comm.size() - 1;
                std::string text;
                try {
                    Join guard{participants(ddp)};
                    ddp.forward([] {});
                    ddp.backward([&](auto ready) {
                        pass(
                            params,
                            comm.rank(),
                            comm.rank() == culprit ? late : Late::never,
                            ready,
                            no_use
                        );
                    });
                    guard.finish();
                } catch (joinable::ContractViolation const& error) {
                    CHECK(comm.rank() == culprit);
                    text = error.what();
                } catch (joinable::PeerFailed const& error) {
                    CHECK(comm.rank() != culprit);
                    CHECK(error.rank() == culprit);
                    text = error.what();
                }
                CAPTURE(text);
                CHECK(
                    text.find("the gradient of parameter 1 (bias) changed after ready(1)") !=
                    std::string::npos
                );
            });
        }
    }
}

TEST_CASE("with verify_ready an honest pass gives the same averages, in a guard too") {
    for (bool const is_view : {false, true}) {
        for (bool const is_static : {false, true}) {
            over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
                auto params = make_params<double>({3, 1, 5});
                DistributedDataParallel ddp{
                    comm,
                    params,
                    {.gradient_as_bucket_view = is_view,
                     .static_graph = is_static,
                     .verify_ready = true}
                };
                Join guard{participants(ddp)};
                for (int round = 0; round <= comm.rank(); ++round) {
                    for (auto& param : params) {
                        for (std::size_t i = 0; i < param.value.size(); ++i) {
                            param.g(i) = 0;
                        }
                    }
                    ddp.forward([] {});
                    ddp.backward([&](auto ready) {
                        pass(params, comm.rank(), Late::never, ready, no_use);
                        if (is_static) { // parameter 0 is used a second time
                            params[0].g(0) += 1;
                            ready(0);
                        }
                    });
                    double sum = 0;
                    for (int rank = round; rank < comm.size(); ++rank) {
                        sum += rank + 1;
                    }
                    double const twice = is_static ? comm.size() - round : 0;
                    CHECK(params[0].g(0) == doctest::Approx((sum + twice) / comm.size()));
                    CHECK(params[1].g(0) == doctest::Approx(sum / comm.size()));
                    CHECK(params[2].g(4) == doctest::Approx(sum / comm.size()));
                }
                guard.finish();
            });
        }
    }
}

using joinable::Sharding;

/// A training in which rank r has r + 1 rounds, and the last pass of the last rank is `late`. Returns what the
/// rank hears of that; nothing if there is no error.
template <class P>
std::string train_sharded(RankCommunicator& comm, Sharding sharding, Late late) {
    std::vector<P> params;
    for (std::size_t const size : {3U, 1U, 5U}) {
        params.emplace_back(size, 1.0);
    }
    params[1].name = "bias";
    joinable::ShardedDataParallel sharded{
        comm,
        params,
        joinable::Sgd{.learning_rate = 1.0},
        joinable::ShardedOptions{
            .sharding = sharding,
            .bucket_cap_bytes = 1, // each parameter travels alone
            .verify_ready = true
        }
    };
    int const culprit = comm.size() - 1;
    std::string text;
    try {
        Join guard{participants(sharded)};
        for (int round = 0; round <= comm.rank(); ++round) {
            drop_gradients(params);
            sharded.forward([&](auto use) {
                for (std::size_t p = 0; p < params.size(); ++p) {
                    [[maybe_unused]] auto const held = use(p);
                }
            });
            bool const is_late = comm.rank() == culprit && round == culprit;
            sharded.backward([&](auto ready, auto use) {
                pass(params, comm.rank(), is_late ? late : Late::never, ready, use);
            });
            sharded.step();
        }
        guard.finish();
        double value = 1;
        for (int rank = 0; rank < comm.size(); ++rank) {
            value -= (rank + 1.0) * (rank + 1.0) / comm.size();
        }
        auto const all = sharded.use_all();
        CHECK(params[0].value[2] == doctest::Approx(value));
        CHECK(params[1].value[0] == doctest::Approx(value));
    } catch (joinable::ContractViolation const& error) {
        CHECK(comm.rank() == culprit);
        text = error.what();
    } catch (joinable::PeerFailed const& error) {
        CHECK(comm.rank() != culprit);
        CHECK(error.rank() == culprit);
        text = error.what();
    }
    return text;
}

TEST_CASE(
    "with verify_ready a sharded model names a gradient that changes after ready, too" *
    doctest::test_suite("[split]")
) {
    for (Late const late : {Late::never, Late::after_its_ready, Late::after_the_last_ready}) {
        over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
            auto const check = [&](std::string const& text) {
                CAPTURE(text);
                if (late == Late::never) {
                    CHECK(text.empty());
                } else {
                    CHECK(text.find("the gradient of parameter 1") != std::string::npos);
                    CHECK(text.find(" changed after ready(1)") != std::string::npos);
                }
            };
            for (Sharding const sharding :
                 {Sharding::none, Sharding::optimizer, Sharding::gradients}) {
                CAPTURE(sharding);
                // After a failure a communicator is of no more use.
                auto part = comm.split(0, comm.rank());
                check(train_sharded<Param<double>>(part, sharding, late));
            }
            {
                auto part = comm.split(0, comm.rank());
                check(train_sharded<CopyingParamOf<double>>(part, Sharding::parameters, late));
            }
            {
                auto part = comm.split(0, comm.rank());
                check(train_sharded<ReleasingParam>(part, Sharding::gradients, late));
            }
        });
    }
}

TEST_CASE("with verify_ready wrong marks are refused as without it") {
    over_ranks({1, 2}, [](RankCommunicator& comm) {
        auto params = make_params<double>({3, 1});
        DistributedDataParallel ddp{comm, params, {.verify_ready = true}};
        ddp.forward([] {});
        CHECK_THROWS_AS(ddp.backward([](auto ready) { ready(2); }), joinable::ContractViolation);
    });
}

} // namespace
