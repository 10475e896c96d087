// SPDX-License-Identifier: BSL-1.0
// DataParallelOptions::verify_ready: a gradient that still changes after ready(i) is named, where the
// buckets would have been summed without its last part.
#include <joinable/participant/data_parallel.hpp>

#include <cstddef>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/linear_model.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/tensor/strided_view.hpp>

namespace {

using namespace joinable_tests;
using joinable::DistributedDataParallel;
using joinable::Join;
using joinable::participants;

/// Where a pass adds to gradient 1 once more.
enum class Late { never, after_its_ready, after_the_last_ready };

/// Each rank adds its number plus one to every element.
void pass(std::vector<Param<double>>& params, int rank, Late late, auto const& ready) {
    auto const add = [&](std::size_t p) {
        for (std::size_t i = 0; i < params[p].value.size(); ++i) {
            params[p].g(i) += rank + 1;
        }
    };
    for (std::size_t p = params.size(); p-- > 0;) {
        add(p);
        ready(p);
        if (p == 1 && late == Late::after_its_ready) {
            add(p);
        }
    }
    if (late == Late::after_the_last_ready) {
        add(1);
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
                            params, comm.rank(), comm.rank() == culprit ? late : Late::never, ready
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
                        pass(params, comm.rank(), Late::never, ready);
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

TEST_CASE("with verify_ready wrong marks are refused as without it") {
    over_ranks({1, 2}, [](RankCommunicator& comm) {
        auto params = make_params<double>({3, 1});
        DistributedDataParallel ddp{comm, params, {.verify_ready = true}};
        ddp.forward([] {});
        CHECK_THROWS_AS(ddp.backward([](auto ready) { ready(2); }), joinable::ContractViolation);
    });
}

} // namespace
