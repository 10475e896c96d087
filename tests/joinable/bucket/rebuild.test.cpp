// SPDX-License-Identifier: BSL-1.0
#include <joinable/bucket/reducer.hpp>

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/linear_model.hpp>
#include <support/numbers.hpp>
#include <support/recording_communicator.hpp>

namespace {

using namespace joinable_tests;
using joinable::BucketOptions;
using joinable::Reducer;

using Trace = std::vector<std::string>;

/// Gradient i becomes (i + 1) * scale, in this order; afterwards it is the sum over ranks.
template <class Comm>
void iterate(
    Reducer<Comm>& reducer,
    std::vector<Param<float>>& params,
    std::vector<std::size_t> const& order,
    float scale,
    int order_source = 0
) {
    reducer.prepare_for_backward(1.0, {}, order_source);
    for (std::size_t const i : order) {
        for (std::size_t k = 0; k < params[i].value.size(); ++k) {
            params[i].g(k) = static_cast<float>(i + 1) * scale;
        }
        reducer.mark_ready(i);
    }
    reducer.finalize_backward();
}

using Parameters = std::vector<std::vector<std::size_t>>;

Parameters parameters_of(std::vector<joinable::Bucket> const& buckets) {
    Parameters parameters;
    for (joinable::Bucket const& bucket : buckets) {
        parameters.push_back(bucket.parameters);
    }
    return parameters;
}

TEST_CASE("buckets are cut by the ready order of one rank, whatever order others have") {
    for (bool const views : {false, true}) {
        over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& inner) {
            RecordingCommunicator comm{inner};
            auto params = make_params<float>({4, 4, 4, 4, 4});
            BucketOptions const options{
                .bucket_cap_bytes = 32, .first_bucket_bytes = 16, .gradient_as_bucket_view = views
            };
            Reducer reducer{comm, joinable::parameters(params), options};
            CHECK(parameters_of(reducer.buckets()) == Parameters{{4, 3, 2, 1, 0}});
            int const source = comm.size() - 1;
            std::vector<std::size_t> order{2, 0, 4, 1, 3};
            if (comm.rank() != source) {
                std::reverse(order.begin(), order.end());
            }
            for (int i = 0; i < 3; ++i) {
                iterate(reducer, params, order, static_cast<float>(i + 1), source);
                for (std::size_t p = 0; p < params.size(); ++p) {
                    CHECK(
                        params[p].g(3) ==
                        static_cast<float>(p + 1) * static_cast<float>((i + 1) * comm.size())
                    );
                }
            }
            // 16 bytes each: the first bucket closes at 16, the others at 32.
            CHECK(parameters_of(reducer.buckets()) == Parameters{{2}, {0, 4}, {1, 3}});
            CHECK(
                comm.trace ==
                Trace{
                    "all_reduce 20 f32",
                    "broadcast 6 u64",
                    "all_reduce 4 f32",
                    "all_reduce 8 f32",
                    "all_reduce 8 f32",
                    "all_reduce 4 f32",
                    "all_reduce 8 f32",
                    "all_reduce 8 f32",
                }
            );
        });
    }
}

TEST_CASE("each bucket has a limit of its own where they are given, and the last one repeats") {
    over_ranks({1, 2}, [](RankCommunicator& comm) {
        auto params = make_params<float>({4, 4, 4, 4, 4, 4});
        BucketOptions const options{.bucket_caps_bytes = {48, 16, 32}};
        Reducer reducer{comm, joinable::parameters(params), options};
        iterate(reducer, params, {0, 1, 2, 3, 4, 5}, 1.0F);
        CHECK(parameters_of(reducer.buckets()) == Parameters{{0, 1, 2}, {3}, {4, 5}});
    });
}

TEST_CASE("a rank that skips has no order: the buckets are cut after the next iteration") {
    over_ranks({2, 3, 4}, [](RankCommunicator& comm) {
        auto params = make_params<float>({4, 4});
        BucketOptions const options{.bucket_cap_bytes = 16};
        Reducer reducer{comm, joinable::parameters(params), options};
        if (comm.rank() == 0) {
            reducer.prepare_for_backward(1.0);
            reducer.mark_ready(1);
            reducer.contribute_nothing();
            reducer.finalize_backward();
        } else {
            iterate(reducer, params, {0, 1}, 1.0F);
        }
        CHECK(params[1].g(0) == static_cast<float>(2 * (comm.size() - 1)));
        CHECK(reducer.buckets().size() == 1);
        iterate(reducer, params, {0, 1}, 1.0F);
        CHECK(reducer.buckets().size() == 2);
        CHECK(reducer.buckets()[0].parameters[0] == 0);
    });
}

TEST_CASE("gradients that live in buckets keep their contents when buckets are cut anew") {
    over_ranks({1, 2, 4}, [](RankCommunicator& comm) {
        // Sizes and dtypes that leave gaps between buckets; one gradient that nobody uses.
        std::vector<Param<float>> floats;
        std::vector<Param<double>> doubles;
        std::vector<Param<joinable::Half>> halves;
        for (std::size_t const n : {3U, 100U, 1U, 0U, 17U}) {
            floats.emplace_back(n);
            doubles.emplace_back(n + 1);
            halves.emplace_back(n + 2);
        }
        BucketOptions const options{
            .bucket_cap_bytes = 64,
            .first_bucket_bytes = 8,
            .gradient_as_bucket_view = true,
            .static_graph = true
        };
        Reducer reducer{comm, joinable::parameters(floats, doubles, halves), options};
        floats[4].g(16) = 77.0F;
        doubles[1].g(100) = 88.0;
        std::vector<std::size_t> order{7, 1, 12, 0, 5, 2, 10, 8, 14, 3, 9, 13};
        for (int round = 0; round < 3; ++round) {
            reducer.prepare_for_backward(1.0);
            for (std::size_t const i : order) {
                std::size_t const k = i % 5;
                for (std::size_t e = 0; i < 5 && e < floats[k].value.size(); ++e) {
                    floats[k].g(e) = static_cast<float>(10 * i + e);
                }
                for (std::size_t e = 0; i / 5 == 1 && e < doubles[k].value.size(); ++e) {
                    doubles[k].g(e) = static_cast<double>(10 * i + e);
                }
                for (std::size_t e = 0; i / 5 == 2 && e < halves[k].value.size(); ++e) {
                    halves[k].g(e) = joinable::Half{static_cast<float>(i)};
                }
                reducer.mark_ready(i);
            }
            reducer.finalize_backward();
            auto const world = static_cast<float>(comm.size());
            for (std::size_t const i : order) {
                std::size_t const k = i % 5;
                for (std::size_t e = 0; i < 5 && e < floats[k].value.size(); ++e) {
                    CHECK(floats[k].g(e) == world * static_cast<float>(10 * i + e));
                }
                for (std::size_t e = 0; i / 5 == 1 && e < doubles[k].value.size(); ++e) {
                    CHECK(doubles[k].g(e) == world * static_cast<double>(10 * i + e));
                }
                for (std::size_t e = 0; i / 5 == 2 && e < halves[k].value.size(); ++e) {
                    CHECK(static_cast<float>(halves[k].g(e)) == world * static_cast<float>(i));
                }
            }
            CHECK(floats[4].g(16) == 77.0F); // parameters 4, 6 and 11 are never used
            CHECK(doubles[1].g(100) == 88.0);
        }
        CHECK(reducer.buckets().size() > 6);
    });
}

TEST_CASE(
    "buckets are cut anew with the strides that all ranks had, not with those that one has now"
) {
    struct Matrix {
        joinable::AnyView value, grad;
    };
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        joinable::Shape const extents{2, 3};
        std::vector<float> values(6);
        std::vector<float> gradients(6);
        std::vector<Matrix> model(1);
        auto const lay_out = [&](joinable::Shape const& strides) {
            model[0].value = {values.data(), joinable::DType::f32, extents, strides};
            model[0].grad = {gradients.data(), joinable::DType::f32, extents, strides};
        };
        lay_out(joinable::row_major_strides(extents));
        Reducer reducer{comm, joinable::parameters(model)};
        if (comm.rank() == 0) { // its engine chooses a layout in the first pass
            lay_out(joinable::column_major_strides(extents));
        }
        for (int round = 0; round < 3; ++round) {
            write(model[0].grad, {0, 1, 2, 3, 4, 5});
            reducer.prepare_for_backward(1.0 / comm.size());
            reducer.mark_ready(0);
            reducer.finalize_backward();
            CHECK(read(model[0].grad) == Numbers{0, 1, 2, 3, 4, 5});
        }
    });
}

} // namespace
