// SPDX-License-Identifier: BSL-1.0
// The oracles: the figures of Rajbhandari et al., "ZeRO", 2020, figure 1 and table 1, and the memory that models have.
#include <joinable/participant/sharded/zero_memory.hpp>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <over_ranks.hpp>
#include <support/gathered_param.hpp>
#include <support/linear_model.hpp>
#include <support/sharded_training.hpp>

#include <joinable/optimizer/state_arrays.hpp>
#include <joinable/participant/sharded/data_parallel.hpp>
#include <joinable/participant/sharded/zero_redundancy_optimizer.hpp>

namespace {

using namespace joinable_tests;
using joinable::ContractViolation;
using joinable::Partition;
using joinable::ShardedDataParallel;
using joinable::ShardedOptions;
using joinable::Sharding;
using joinable::zero_memory;
using joinable::ZeroMemory;
using joinable::ZeroRedundancyOptimizer;

constexpr Sharding all_shardings[] = {
    Sharding::none, Sharding::optimizer, Sharding::gradients, Sharding::parameters
};

// ---- The paper: a model of 7.5e9 parameters of 16 bits, by Adam ---------------------------------

constexpr std::size_t paper_parameters = 7'500'000'000;

/// Tenths of 1e9 bytes, rounded. The paper does not count buckets.
constexpr std::size_t tenths_of_gigabytes(Sharding sharding, int ranks) {
    ZeroMemory const memory =
        zero_memory<Adam>(paper_parameters, DType::f16, sharding, ranks, true, true);
    return (memory.total() - memory.buckets + 50'000'000) / 100'000'000;
}

static_assert(zero_memory<Adam>(1, DType::f16, Sharding::none, 1, true, true).total() == 16);
static_assert(tenths_of_gigabytes(Sharding::none, 1) == 1200);
static_assert(tenths_of_gigabytes(Sharding::optimizer, 64) == 314);
static_assert(tenths_of_gigabytes(Sharding::gradients, 64) == 166);
static_assert(tenths_of_gigabytes(Sharding::parameters, 64) == 19);

TEST_CASE("memory for other numbers of ranks is that of the paper's table") {
    CHECK(tenths_of_gigabytes(Sharding::none, 64) == 1200);
    CHECK(tenths_of_gigabytes(Sharding::parameters, 1) == 1200);
    CHECK(tenths_of_gigabytes(Sharding::optimizer, 4) == 525);
    CHECK(tenths_of_gigabytes(Sharding::gradients, 4) == 413);
    CHECK(tenths_of_gigabytes(Sharding::parameters, 4) == 300);
    CHECK(tenths_of_gigabytes(Sharding::optimizer, 16) == 356);
    CHECK(tenths_of_gigabytes(Sharding::gradients, 16) == 216);
    CHECK(tenths_of_gigabytes(Sharding::parameters, 16) == 75);
    CHECK(tenths_of_gigabytes(Sharding::optimizer, 1024) == 301);
    CHECK(tenths_of_gigabytes(Sharding::gradients, 1024) == 151);
}

TEST_CASE("a part is rounded up, and the numbers that a rule keeps count by its settings") {
    Sgd const rule{.momentum = 0.9};
    auto const uneven = zero_memory(10, DType::f16, Sharding::parameters, 3, true, false, rule, 6);
    CHECK(uneven == ZeroMemory{4 * 2, 4 * 2, 4 * 4, 4 * 4, 2 * 2 * 6});
    CHECK(zero_memory<Sgd>(10, DType::f32, Sharding::optimizer, 3).state == 0);
    CHECK(zero_memory<Adam>(10, DType::f64, Sharding::optimizer, 3).state == 4 * 2 * 8);
    CHECK(zero_memory<Adam>(10, DType::f64, Sharding::optimizer, 3).masters == 0);
    AdamW const amsgrad{.amsgrad = true};
    CHECK(zero_memory(10, DType::f32, Sharding::none, 3, true, true, amsgrad).state == 10 * 3 * 4);
}

TEST_CASE("the memory of a sharded training is computed at run time as by the compiler") {
    for (int const ranks : {1, 4, 16, 64, 1024}) {
        for (Sharding const sharding : all_shardings) {
            auto const memory =
                zero_memory<AdamW>(paper_parameters, DType::bf16, sharding, ranks, true, true);
            double const part = 1.0 / ranks;
            double const expected =
                7.5e9 * (2 * (sharding == Sharding::parameters ? part : 1) +
                         2 * (joinable::detail::reduces_to_owners(sharding) ? part : 1) +
                         12 * (sharding == Sharding::none ? 1 : part));
            CHECK(
                static_cast<double>(memory.total() - memory.buckets) == doctest::Approx(expected)
            );
        }
    }
}

TEST_CASE("memory for no ranks, or for integers, is refused in a sentence") {
    CHECK_THROWS_WITH_AS(
        static_cast<void>(zero_memory<Adam>(1, DType::f32, Sharding::none, 0)),
        "zero_memory() was asked about 0 ranks; give at least 1",
        ContractViolation
    );
    CHECK_THROWS_WITH_AS(
        static_cast<void>(zero_memory<Adam>(1, DType::i32, Sharding::none, 1)),
        "zero_memory() was asked about parameters of i32; give a floating-point type, and count a complex number as two of "
        "its reals",
        ContractViolation
    );
}

// ---- Models --------------------------------------------------------------------------------------

constexpr std::size_t count = 8;
constexpr std::size_t numel =
    768; // parts of whole cache lines for 1, 2, 3, 4 and 8 ranks, in 16 bits, too

std::vector<GatheredParam> make_equal(DType dtype) {
    std::vector<StridedParam> params;
    for (std::size_t i = 0; i < count; ++i) {
        params.push_back({{OwnedTensor{dtype, {numel}, {1}}, OwnedTensor{dtype, {numel}, {1}}, {}}}
        );
        params.back().need_grad();
    }
    return gathered(std::move(params));
}

/// Bytes of the buckets in which gradients travel to all ranks.
template <class Ddp>
std::size_t bytes_of_buckets(Ddp const& ddp) {
    std::size_t bytes = 0;
    for (joinable::Bucket const& bucket : ddp.buckets()) {
        bytes += bucket.buffer.bytes();
    }
    return bytes;
}

template <class F>
void for_each_training(F const& f) {
    for (DType const dtype : {DType::f32, DType::f64, DType::bf16}) {
        for (bool const views : {false, true}) {
            std::size_t const whole = count * numel * size_of(dtype);
            f(dtype, views, whole, Adam{});
            f(dtype, views, whole, Sgd{.momentum = 0.9});
            f(dtype, views, whole / 4, AdamW{.amsgrad = true}); // buckets of two parameters
            f(dtype, views, whole / 4, Sgd{});
        }
    }
}

TEST_CASE("a model has the computed memory, with every sharding and rule") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        for_each_training([&](DType dtype, bool views, std::size_t cap, auto const& rule) {
            std::size_t const whole = count * numel * size_of(dtype);
            for (Sharding const sharding : all_shardings) {
                bool const sends_values =
                    sharding == Sharding::optimizer || sharding == Sharding::gradients;
                bool const has_all_gradients =
                    sharding == Sharding::none || sharding == Sharding::optimizer;
                auto params = make_equal(dtype);
                ShardedDataParallel sharded{
                    comm,
                    params,
                    rule,
                    ShardedOptions{
                        .sharding = sharding,
                        .partition = Partition::flat,
                        .bucket_cap_bytes = cap,
                        .gradient_as_bucket_view = views && has_all_gradients,
                        .parameters_as_bucket_view = views && sends_values
                    }
                };
                auto const planned = zero_memory(
                    count * numel, dtype, sharding, comm.size(), true, views, rule, cap
                );
                CHECK(planned.state + planned.masters == sharded.state_bytes());
                std::size_t const kept = sharded.value_bytes(); // or the engine keeps them
                CHECK(planned.values == (kept != 0 ? kept : whole));
                CHECK(planned.gradients == (has_all_gradients ? whole : sharded.gradient_bytes()));
                std::size_t const copies = has_all_gradients && !views ? whole : 0;
                CHECK(planned.buckets == copies + sharded.bucket_bytes() + sharded.unit_bytes());
            }
        });
    });
}

TEST_CASE("a model beside a sharded optimizer has the computed memory, in buckets or twice") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        for_each_training([&](DType dtype, bool views, std::size_t cap, auto const& rule) {
            std::size_t const whole = count * numel * size_of(dtype);
            auto params = make_equal(dtype);
            DistributedDataParallel ddp{
                comm, params, joinable::DataParallelOptions{.gradient_as_bucket_view = views}
            };
            ZeroRedundancyOptimizer zero{
                comm,
                params,
                rule,
                {.partition = Partition::flat,
                 .bucket_cap_bytes = cap,
                 .parameters_as_bucket_view = views}
            };
            auto const planned = zero_memory(
                count * numel, dtype, Sharding::optimizer, comm.size(), true, views, rule, cap
            );
            CHECK(bytes_of_buckets(ddp) == whole);
            CHECK(planned.gradients == whole);
            CHECK(planned.values == (views ? zero.value_bytes() : whole));
            CHECK(planned.state + planned.masters == zero.state_bytes());
            std::size_t const copies = views ? 0 : bytes_of_buckets(ddp);
            CHECK(planned.buckets == copies + zero.bucket_bytes());
        });
    });
}

TEST_CASE("an optimizer that averages gradients itself needs no more than the computed memory") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        for_each_training([&](DType dtype, bool views, std::size_t cap, auto const& rule) {
            auto params = make_equal(dtype);
            ZeroRedundancyOptimizer zero{
                comm,
                params,
                rule,
                {.partition = Partition::flat,
                 .bucket_cap_bytes = cap,
                 .reduces_gradients = true,
                 .parameters_as_bucket_view = views}
            };
            auto const planned = zero_memory(
                count * numel, dtype, Sharding::gradients, comm.size(), true, views, rule, cap
            );
            CHECK(planned.gradients == zero.gradient_bytes());
            CHECK(planned.state + planned.masters == zero.state_bytes());
            CHECK(planned.buckets >= zero.bucket_bytes());
        });
    });
}

TEST_CASE("state without masters has the type of the values, and masters have 32 bits") {
    for (DType const dtype : {DType::f16, DType::bf16, DType::f32}) {
        for (bool const masters : {false, true}) {
            bool const has_masters = masters && dtype != DType::f32;
            for (int const ranks : {1, 2, 3, 4, 8}) {
                auto const planned =
                    zero_memory<Adam>(numel, dtype, Sharding::optimizer, ranks, masters);
                std::size_t const part = numel / static_cast<std::size_t>(ranks);
                joinable::detail::StateArrays const arrays{dtype, part, 2, has_masters};
                CHECK(planned.state + planned.masters == arrays.bytes());
                CHECK(planned.masters == (has_masters ? part * 4 : 0));
            }
        }
    }
}

TEST_CASE("of a model that cannot be divided evenly ranks have the computed memory together") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        constexpr std::size_t elements = 4000 + 70 + 1000 + 3000 + 1 + 8000;
        auto params = make_params<float>({4000, 70, 1000, 3000, 1, 8000});
        auto const ranks = static_cast<std::size_t>(comm.size());
        auto const planned =
            zero_memory<Adam>(elements, DType::f32, Sharding::gradients, comm.size());
        for (Partition const partition : {Partition::flat, Partition::by_parameters}) {
            ShardedDataParallel sharded{
                comm,
                params,
                Adam{},
                ShardedOptions{.sharding = Sharding::gradients, .partition = partition}
            };
            std::uint64_t sum = sharded.state_bytes();
            std::uint64_t largest = sum;
            comm.all_reduce({&sum, 1, DType::u64}, joinable::ReduceOp::sum).wait();
            comm.all_reduce({&largest, 1, DType::u64}, joinable::ReduceOp::max).wait();
            CHECK(largest >= planned.state);
            if (partition == Partition::flat) {
                CHECK(sharded.state_bytes() < planned.state + 2 * 64); // of one bucket
                CHECK(sharded.gradient_bytes() < planned.gradients + 64);
            } else {
                CHECK(sum == elements * 2 * sizeof(float));
                CHECK(planned.state * ranks - sum < ranks * 2 * sizeof(float)); // rounded up
            }
        }
    });
}

} // namespace
