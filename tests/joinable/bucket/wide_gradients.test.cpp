// SPDX-License-Identifier: BSL-1.0
// Gradients of f32 beside values of 16 bits: they are averaged as they are. Compared with averages in double.
#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <support/process_ranks.hpp>
#include <support/thrown_by.hpp>
#include <support/wide_param.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/sharded/zero_redundancy_optimizer.hpp>

namespace {

using namespace joinable_tests;
using joinable::ContractViolation;
using joinable::DataParallelOptions;
using joinable::DistributedDataParallel;
using joinable::DType;

constexpr std::size_t count = 5;

std::size_t inputs_of(int rank) {
    return 4 - static_cast<std::size_t>(rank % 3);
}
/// Needs more bits than f16 and bf16 have.
double gradient_of(std::size_t element, int rank, std::size_t round) {
    return 1.0 +
           std::ldexp(
               static_cast<double>(element + 8 * static_cast<std::size_t>(rank) + 64 * round), -16
           );
}
double average_of(std::size_t element, int size, std::size_t round) {
    double sum = 0;
    for (int rank = 0; rank < size; ++rank) {
        sum += round < inputs_of(rank) ? gradient_of(element, rank, round) : 0.0;
    }
    return sum / size;
}

/// Trains in a guard until all ranks have run out. `wide` has gradients of f32, `narrow` those of its value.
template <class P>
void train(auto& comm, P& wide, P& narrow, DataParallelOptions const& options) {
    std::vector<P*> model{&wide, &narrow};
    DistributedDataParallel ddp{comm, joinable::parameters(model), options};
    joinable::Join join{joinable::participants(ddp)};
    for (std::size_t round = 0; round < inputs_of(comm.rank()); ++round) {
        ddp.forward([] {});
        ddp.backward([&](auto ready) {
            for (std::size_t const i : {1U, 0U}) {
                model[i]->need_grad();
                Numbers gradient;
                for (std::size_t e = 0; e < count; ++e) {
                    gradient.push_back(i == 0 ? gradient_of(e, comm.rank(), round) : 1.0);
                }
                write(model[i]->grad, gradient);
                ready(i);
            }
        });
        Numbers const averages = read(wide.grad);
        for (std::size_t e = 0; e < count; ++e) {
            double const expected = average_of(e, comm.size(), round);
            CHECK(std::abs(averages[e] - expected) <= std::ldexp(2.0, -23));
        }
    }
    join.finish();
}

} // namespace

TEST_CASE(
    "gradients of f32 beside values of 16 bits are averaged in f32, by copies and as bucket views"
) {
    run_all_ranks({1, 2, 3, 4, 8}, [](auto& comm) {
        for (DType const value : {DType::f16, DType::bf16}) {
            for (bool const are_views : {false, true}) {
                DataParallelOptions const options{.gradient_as_bucket_view = are_views};
                auto wide = wide_param<WideParam>(value, DType::f32, count);
                auto narrow = wide_param<WideParam>(value, value, count);
                narrow.says = value;
                train(comm, wide, narrow, options);
                CHECK(wide.grad.dtype() == DType::f32);
                CHECK(narrow.grad.dtype() == value);
            }
        }
    });
}

TEST_CASE("a gradient that is there when the model is made says that gradients are f32") {
    run_all_ranks({1, 2, 3, 4, 8}, [](auto& comm) {
        auto wide = wide_param<StridedParam>(DType::bf16, DType::f32, count);
        auto narrow = wide_param<StridedParam>(DType::bf16, DType::bf16, count);
        wide.need_grad();
        train(comm, wide, narrow, {});
    });
}

TEST_CASE("a gradient of f32 that comes later is refused, with what to do") {
    run_ranks({1}, [](auto& comm) {
        auto param = wide_param<StridedParam>(DType::bf16, DType::f32, count);
        std::vector<StridedParam*> model{&param};
        DistributedDataParallel ddp{comm, joinable::parameters(model)};
        ddp.forward([] {});
        auto const error = thrown_by<ContractViolation>([&] {
            ddp.backward([&](auto ready) {
                param.need_grad();
                ready(0);
            });
        });
        CHECK(
            std::string{error.what()} ==
            "the gradient of parameter 0 on rank 0 is f32 (5), but its value is bf16 (5); both need the same dtype, "
            "extents and device, or let parameter_traits::grad_dtype say f32 before there is one"
        );
    });
}

TEST_CASE("a gradient of 16 bits where f32 was to come is refused") {
    run_ranks({1}, [](auto& comm) {
        auto param = wide_param<WideParam>(DType::bf16, DType::bf16, count);
        std::vector<WideParam*> model{&param};
        DistributedDataParallel ddp{comm, joinable::parameters(model)};
        ddp.forward([] {});
        auto const error = thrown_by<ContractViolation>([&] {
            ddp.backward([&](auto ready) {
                param.need_grad();
                ready(0);
            });
        });
        CHECK(
            std::string{error.what()} ==
            "the gradient of parameter 0 on rank 0 is bf16 (5), but was to be f32 (5); both need the same dtype, "
            "extents and device"
        );
    });
}

TEST_CASE(
    "what gradients are to be is the same on all ranks, and as wide as the value or f32 beside 16 bits"
) {
    run_ranks({1, 2, 3, 4, 8}, [](auto& comm) {
        auto param = wide_param<WideParam>(DType::bf16, DType::f32, count);
        std::vector<WideParam*> model{&param};
        param.says = DType::f64;
        if (comm.size() == 1) {
            auto const error = thrown_by<ContractViolation>([&] {
                DistributedDataParallel ddp{comm, joinable::parameters(model)};
            });
            CHECK(
                std::string{error.what()} ==
                "parameter_traits::grad_dtype of parameter 0 is f64, but its value is bf16; return the same, or f32 "
                "beside f16 or bf16"
            );
            return;
        }
        param.says = comm.rank() == 0 ? DType::bf16 : DType::f32;
        auto const error = thrown_by<joinable::Mismatch>([&] {
            DistributedDataParallel ddp{comm, joinable::parameters(model)};
        });
        CHECK(std::string{error.what()}.find("bf16 (5), gradients f32") != std::string::npos);
    });
}

TEST_CASE("sharded training refuses gradients of f32 beside values of 16 bits, by name") {
    run_ranks({1}, [](auto& comm) {
        auto param = wide_param<WideParam>(DType::bf16, DType::f32, count);
        std::vector<WideParam*> model{&param};
        auto const error = thrown_by<ContractViolation>([&] {
            joinable::ZeroRedundancyOptimizer zero{
                comm, joinable::parameters(model), joinable::Sgd{}
            };
        });
        CHECK(
            std::string{error.what()} ==
            "parameter 0 has gradients of f32 beside a value of 16 bits, which sharded training does not step; give "
            "them the value's dtype: their owner steps them in f32"
        );
    });
}
