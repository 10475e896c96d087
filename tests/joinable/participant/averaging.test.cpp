// SPDX-License-Identifier: BSL-1.0
#include <joinable/participant/averaging.hpp>

#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/linear_model.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/participant/data_parallel.hpp>

using namespace joinable_tests;

TEST_CASE("a guard's divide_by_initial_world_size holds for each of its models") {
    // Rank r has r + 1 batches, and every gradient is 1: with the active ranks each average is 1.
    for (bool const by_initial : {true, false}) {
        over_ranks({3}, [&](RankCommunicator& comm) {
            std::vector<Param<float>> first;
            std::vector<Param<float>> second;
            first.emplace_back(1);
            second.emplace_back(1);
            joinable::DistributedDataParallel one{comm, first};
            joinable::DistributedDataParallel other{comm, second};
            joinable::Join guard{
                joinable::participants(one, other),
                joinable::divide_by_initial_world_size = by_initial
            };
            auto const pass = [](auto& ddp, auto& parameter) {
                ddp.forward([] {});
                ddp.backward([&](auto ready) {
                    parameter.g(0) = 1.0F;
                    ready(0);
                });
            };
            for (int batch = 0; batch <= comm.rank(); ++batch) {
                pass(one, first[0]);
                pass(other, second[0]);
                float const expected = by_initial ? static_cast<float>(3 - batch) / 3.0F : 1.0F;
                CHECK(first[0].g(0) == doctest::Approx(expected));
                CHECK(second[0].g(0) == doctest::Approx(expected));
            }
            guard.finish();
        });
    }
}
