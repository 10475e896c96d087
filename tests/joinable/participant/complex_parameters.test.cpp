// SPDX-License-Identifier: BSL-1.0
// Parameters of complex numbers: gradients, dense or rows, are averaged and values stepped as pairs of reals; and sums of
// complex numbers in which ranks have joined. The oracle is the average by std::complex.
#include <joinable/participant/data_parallel.hpp>

#include <array>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <support/embedding.hpp>
#include <support/process_ranks.hpp>
#include <support/ranks.hpp>

#include <joinable/bucket/compression/cast_to.hpp>
#include <joinable/participant/action.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/participant/sharded/zero_redundancy_optimizer.hpp>
#include <joinable/tensor/parameters.hpp>

namespace {

using joinable::DistributedDataParallel;
using joinable::DType;
using joinable::ThreadCommunicator;
using joinable_tests::run_process_ranks;
using joinable_tests::run_ranks;

template <class Real>
struct ComplexParam {
    std::vector<std::complex<Real>> value, grad;
};

template <class Real>
void check_training(ThreadCommunicator& comm) {
    using Number = std::complex<Real>;
    std::vector<ComplexParam<Real>> model(3);
    for (auto& param : model) {
        auto const rank = static_cast<Real>(comm.rank());
        param.value.assign(5, Number{rank, 4}); // all start with rank 0's
        param.grad.assign(5, Number{});
    }
    DistributedDataParallel ddp{comm, model};
    joinable::ZeroRedundancyOptimizer zero{comm, model, joinable::Sgd{.learning_rate = 0.5}};
    Number expected{0, 4};
    joinable::Join guard{joinable::participants(ddp, zero)};
    for (int input = 0; input <= comm.rank(); ++input) { // rank r has r + 1
        ddp.forward([] {});
        ddp.backward([&](auto ready) {
            for (std::size_t i = model.size(); i-- > 0;) {
                auto const rank = static_cast<Real>(comm.rank());
                model[i].grad.assign(5, Number{8 * rank, -16});
                ready(i);
            }
        });
        Number sum{}; // joined ranks count as zeros
        for (int rank = input; rank < comm.size(); ++rank) {
            sum += Number{8 * static_cast<Real>(rank), -16};
        }
        Number const average = sum / static_cast<Real>(comm.size());
        for (auto const& param : model) {
            for (Number const& number : param.grad) {
                CHECK(std::abs(number - average) <= 1e-5);
            }
        }
        zero.step();
        expected -= Real(0.5) * average;
        for (auto const& param : model) {
            for (Number const& number : param.value) {
                CHECK(std::abs(number - expected) <= 1e-4);
            }
        }
    }
    guard.finish();
}

TEST_CASE("complex gradients are averaged, and rules step complex values as pairs of reals") {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        check_training<float>(comm);
        check_training<double>(comm);
    });
}

/// What a rank adds to row `index`, column c, in a round. Rank 0 has the row of all, twice; odd ranks have a row each.
template <class Real>
std::complex<Real> element(int rank, int round, std::size_t c) {
    return {
        static_cast<Real>(rank + 2 * round), static_cast<Real>(-3 * rank) - static_cast<Real>(c)
    };
}
std::vector<std::int64_t> indices_of(int rank) {
    return rank == 0       ? std::vector<std::int64_t>{4, 4}
           : rank % 2 == 1 ? std::vector<std::int64_t>{4, rank % 8}
                           : std::vector<std::int64_t>{};
}

template <class Real, class Comm>
void check_rows(Comm& comm) {
    constexpr std::size_t width = joinable_tests::Embedding::width;
    std::vector<joinable_tests::ComplexEmbedding<Real>> model(2);
    auto& gradient = model[1];
    DistributedDataParallel ddp{comm, model, {.joined_gradients = joinable::JoinedGradients::kept}};
    auto const check = [&](int round) { // joined ranks send no rows and count in the divisor
        std::map<std::int64_t, std::array<std::complex<Real>, width>> sums;
        for (int rank = round; rank < comm.size(); ++rank) {
            for (std::int64_t const index : indices_of(rank)) {
                for (std::size_t c = 0; c < width; ++c) {
                    sums[index][c] += element<Real>(rank, round, c);
                }
            }
        }
        REQUIRE(gradient.indices.has_value());
        REQUIRE(gradient.indices->size() == sums.size());
        std::size_t k = 0;
        for (auto const& [index, row] : sums) { // ascending, each once
            CHECK((*gradient.indices)[k] == index);
            for (std::size_t c = 0; c < width; ++c) {
                std::complex<Real> const average = row[c] / static_cast<Real>(comm.size());
                CHECK(std::abs(gradient.rows[k * width + c] - average) <= 1e-5);
            }
            ++k;
        }
    };
    joinable::Join guard{joinable::participants(ddp)};
    for (int round = 0; round <= comm.rank(); ++round) { // rank r has r + 1
        ddp.forward([] {});
        ddp.backward([&](auto ready) {
            for (auto& embedding : model) {
                embedding.indices = indices_of(comm.rank());
                embedding.rows.clear();
                for (std::size_t k = 0; k < embedding.indices->size(); ++k) {
                    for (std::size_t c = 0; c < width; ++c) {
                        embedding.rows.push_back(element<Real>(comm.rank(), round, c));
                    }
                }
            }
            ready(1);
            ready(0);
        });
        check(round);
    }
    guard.finish();
    check(comm.size() - 1); // joined ranks, too, have received what the last one sent
}

/// Sums and products in which rank r takes part r + 1 times, and its shadow adds 0, or multiplies by 1, after that.
template <class Real, class Comm>
void check_raw(Comm& comm) {
    using Number = std::complex<Real>;
    auto const reduced = [&](std::size_t count, Number number, joinable::ReduceOp op) {
        std::vector<Number> numbers(count, number);
        comm.all_reduce({numbers.data(), count, joinable::dtype_of<Number>}, op).wait();
        return numbers;
    };
    std::size_t const counts[] = {1, 7, 20'011};
    joinable::Action action{
        comm,
        [&](int round) {
            for (std::size_t const count : counts) {
                Number sum{};
                Number product{1, 0};
                for (int rank = round; rank < comm.size(); ++rank) {
                    sum += Number{static_cast<Real>(rank), static_cast<Real>(-2)};
                    product *= Number{0, 2}; // whole numbers: nothing rounds
                }
                Number const mine{static_cast<Real>(comm.rank()), -2};
                CHECK(
                    reduced(count, mine, joinable::ReduceOp::sum) == std::vector<Number>(count, sum)
                );
                CHECK(
                    reduced(count, {0, 2}, joinable::ReduceOp::product) ==
                    std::vector<Number>(count, product)
                );
            }
        },
        [&] {
            for (std::size_t const count : counts) {
                (void)reduced(count, {}, joinable::ReduceOp::sum);
                (void)reduced(count, {1, 0}, joinable::ReduceOp::product);
            }
        }
    };
    joinable::Join guard{joinable::participants(action)};
    for (int round = 0; round <= comm.rank(); ++round) {
        action(round);
    }
    guard.finish();
}

/// A reduction of buckets gets complex gradients as reals. f64 holds the sums of f32 here exactly.
template <class Comm>
void check_reduction(Comm& comm) {
    using Number = std::complex<float>;
    std::vector<ComplexParam<float>> model(2);
    for (auto& param : model) {
        param.value.assign(5, {});
        param.grad.assign(5, {});
    }
    DistributedDataParallel ddp{comm, model, {}, joinable::CastTo<DType::f64>{}};
    joinable::Join guard{joinable::participants(ddp)};
    for (int round = 0; round <= comm.rank(); ++round) {
        ddp.forward([] {});
        ddp.backward([&](auto ready) {
            for (std::size_t i = model.size(); i-- > 0;) {
                model[i].grad.assign(5, Number{8.0F * static_cast<float>(comm.rank()), -24});
                ready(i);
            }
        });
        Number sum{};
        for (int rank = round; rank < comm.size(); ++rank) {
            sum += Number{8.0F * static_cast<float>(rank), -24};
        }
        for (auto const& param : model) {
            for (Number const& number : param.grad) {
                CHECK(std::abs(number - sum / static_cast<float>(comm.size())) <= 1e-5);
            }
        }
    }
    guard.finish();
}

/// Complex numbers have no order and no bits to combine: each reduction says so, moves nothing and leaves all usable.
template <class Comm>
void check_refusals(Comm& comm) {
    using joinable::ReduceOp;
    std::vector<std::complex<double>> whole(static_cast<std::size_t>(comm.size()), {1, 2});
    auto const before = whole;
    joinable::Buffer const all{whole.data(), whole.size(), DType::c128};
    std::complex<double> part{};
    joinable::Buffer const one{&part, 1, DType::c128};
    for (ReduceOp const op : {ReduceOp::min, ReduceOp::max, ReduceOp::bit_and, ReduceOp::bit_or}) {
        std::string const text = joinable::detail::concat(
            "a reduction of complex numbers is a sum or a product, but was given ",
            joinable::name_of(op),
            " of c128; reduce their magnitudes instead"
        );
        using joinable::ContractViolation;
        CHECK_THROWS_WITH_AS((void)comm.all_reduce(all, op), text.c_str(), ContractViolation);
        CHECK_THROWS_WITH_AS(
            (void)comm.reduce_scatter(all, one, op), text.c_str(), ContractViolation
        );
    }
    CHECK_THROWS_AS(
        (void)comm.all_reduce(all, ReduceOp::product, 0.5), joinable::ContractViolation
    );
    CHECK(whole == before);
    CHECK(!comm.is_aborted());
    int ranks = 1;
    comm.all_reduce({&ranks, 1, DType::i32}, ReduceOp::sum).wait();
    CHECK(ranks == comm.size());
}

TEST_CASE("rows of complex numbers are added and averaged, and ranks that have joined send none") {
    auto const check = [](auto& comm) {
        check_rows<float>(comm);
        check_rows<double>(comm);
    };
    run_ranks({1, 2, 3, 4, 8}, check);
    run_process_ranks({1, 2, 3, 4, 8}, check);
}

TEST_CASE("ranks that have joined add zeros to complex sums, and ones to products") {
    auto const check = [](auto& comm) {
        check_raw<float>(comm);
        check_raw<double>(comm);
        check_reduction(comm);
    };
    run_ranks({1, 2, 3, 4, 8}, check);
    run_process_ranks({1, 2, 3, 4, 8}, check);
}

TEST_CASE("reductions that complex numbers do not have are refused in a sentence") {
    auto const check = [](auto& comm) { check_refusals(comm); };
    run_ranks({1, 2, 3, 4, 8}, check);
    run_process_ranks({1, 2, 3, 4, 8}, check);
}

} // namespace

TEST_CASE("a list tells complex parameters from reals, and its views have both parts") {
    std::vector<ComplexParam<double>> model(1);
    model[0].value = {{1, 2}, {3, 4}};
    auto const list = joinable::parameters(model);
    CHECK(list[0].is_complex());
    joinable::AnyView const value = list[0].value();
    CHECK(value.dtype() == DType::f64);
    CHECK(value.extents() == joinable::Shape{2, 2});
    CHECK(value.as<double>()(1, 0) == 3.0);
    CHECK(
        joinable::detail::as_complex(value).as<std::complex<double>>()(1) ==
        std::complex<double>{3, 4}
    );
}
