// SPDX-License-Identifier: BSL-1.0
#include <joinable/participant/averaging.hpp>

#include <cmath>
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/linear_model.hpp>
#include <support/numbers.hpp>
#include <support/strided_param.hpp>

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

TEST_CASE("averages of 16 bits are those of doubles, however many tokens there are") {
    using joinable::DType;
    using joinable::GradientKind;
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        int const size = comm.size();
        for (std::uint64_t const tokens : {1'000U, 3'000'000U, 20'000'000U, 40'000'000U}) {
            for (GradientKind const kind : {GradientKind::sum, GradientKind::mean}) {
                for (DType const dtype : {DType::f16, DType::bf16}) {
                    for (bool const views : {false, true}) {
                        std::vector<StridedParam> params;
                        params.push_back({{{dtype, {2}, {1}}, {dtype, {2}, {1}}, {}}});
                        params[0].need_grad();
                        joinable::DistributedDataParallel ddp{
                            comm, params, {.gradient_as_bucket_view = views, .gradient_kind = kind}
                        };
                        // A sum over tokens is large. Both dtypes have these numbers.
                        auto const gradient = [&](int rank) {
                            return kind == GradientKind::sum ? 256.0 * (200 + rank) : 1.0 + rank;
                        };
                        auto const weight = [&](int rank) { // of rank 0 it is a tiny share
                            return rank == 0 && size > 1 ? 1 : tokens * std::uint64_t(1 + rank);
                        };
                        ddp.forward([] {}, {.weight = weight(comm.rank())});
                        ddp.backward([&](auto ready) {
                            write(params[0].grad, {gradient(comm.rank()), -gradient(comm.rank())});
                            ready(0);
                        });
                        double total = 0;
                        double sum = 0;
                        for (int rank = 0; rank < size; ++rank) {
                            auto const own = static_cast<double>(weight(rank));
                            total += own;
                            sum += gradient(rank) * (kind == GradientKind::sum ? 1.0 : own);
                        }
                        // Each rank's term is rounded, and the sum of each further rank.
                        double const unit = dtype == DType::f16 ? 0x1p-11 : 0x1p-8;
                        double const exact = sum / total;
                        Numbers const got = read(params[0].grad);
                        CAPTURE(exact);
                        CAPTURE(got[0]);
                        CAPTURE(size);
                        CHECK(std::abs(got[0] - exact) <= (size + 1) * unit * exact);
                        CHECK(got[1] == -got[0]);
                    }
                }
            }
        }
    });
}
