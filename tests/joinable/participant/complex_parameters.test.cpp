// SPDX-License-Identifier: BSL-1.0
// Parameters of complex numbers: gradients are averaged and values stepped as pairs of reals. The oracle is the
// average by std::complex.
#include <joinable/participant/data_parallel.hpp>

#include <complex>
#include <cstddef>
#include <vector>

#include <doctest/doctest.h>
#include <support/ranks.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/participant/sharded/zero_redundancy_optimizer.hpp>
#include <joinable/tensor/parameters.hpp>

namespace {

using joinable::DistributedDataParallel;
using joinable::DType;
using joinable::ThreadCommunicator;
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
