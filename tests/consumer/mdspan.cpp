// SPDX-License-Identifier: BSL-1.0
// std::mdspan as a tensor: for a compiler and a standard library that have it, which the other tests need not.
#include <joinable/interop/mdspan.hpp>

#include <array>
#include <cstddef>
#include <mdspan>
#include <vector>

#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <joinable/communicator/collectives.hpp>
#include <joinable/communicator/shared_memory/run_threads.hpp>
#include <joinable/communicator/shared_memory/thread.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/parameter.hpp>

namespace {

using joinable::Shape;
using Rows = std::mdspan<float, std::dextents<int, 2>>;
using Columns =
    std::mdspan<float, std::extents<std::size_t, 3, std::dynamic_extent>, std::layout_left>;
using Strided = std::mdspan<double, std::dextents<std::size_t, 2>, std::layout_stride>;

static_assert(joinable::WritableTensor<Rows> && joinable::WritableTensor<Columns const>);
static_assert(joinable::Tensor<std::mdspan<int const, std::dextents<int, 1>>>);
static_assert(!joinable::WritableTensor<std::mdspan<int const, std::dextents<int, 1>>>);
static_assert(joinable::Tensor<std::mdspan<bool, std::dextents<int, 1>>>);

struct Parameter {
    Rows value, grad;
};
static_assert(joinable::models_parameter<Parameter>());

TEST_CASE("an mdspan has the extents and strides of its layout") {
    std::vector<float> floats(12);
    std::vector<double> doubles(12);
    Rows const rows{floats.data(), 4, 3};
    Columns const columns{floats.data(), 4};
    Strided const strided{
        doubles.data(),
        std::layout_stride::mapping{std::dextents<std::size_t, 2>{2, 3}, std::array{6UZ, 2UZ}}
    };
    CHECK(joinable::extents(rows) == Shape{4, 3});
    CHECK(joinable::strides(rows) == Shape{3, 1});
    CHECK(joinable::extents(columns) == Shape{3, 4});
    CHECK(joinable::strides(columns) == Shape{1, 3});
    CHECK(joinable::strides(strided) == Shape{6, 2});
    auto const view = joinable::AnyView{strided}.as<double>();
    CHECK(&view(1, 2) == &strided[1, 2]);
    CHECK_THROWS_AS((void)joinable::to_buffer(strided), joinable::ContractViolation);
}

TEST_CASE("collectives take an mdspan of either order") {
    for (int const size : {1, 2, 3, 4, 8}) {
        joinable::run_threads(size, [&](joinable::ThreadCommunicator& comm) {
            auto const rank = static_cast<float>(comm.rank());
            std::vector<float> numbers(12, rank);
            joinable::all_reduce(comm, Columns{numbers.data(), 4}).wait();
            CHECK(numbers == std::vector<float>(12, static_cast<float>(size * (size - 1) / 2)));
            numbers.assign(12, rank);
            joinable::broadcast(comm, Rows{numbers.data(), 4, 3}, size - 1).wait();
            CHECK(numbers == std::vector<float>(12, static_cast<float>(size - 1)));
        });
    }
}

} // namespace
