// SPDX-License-Identifier: BSL-1.0
#include <joinable/tensor/shape.hpp>

#include <cstddef>
#include <limits>
#include <span>
#include <vector>

#include <doctest/doctest.h>

namespace {

using joinable::ContractViolation;
using joinable::is_contiguous;
using joinable::numel;
using joinable::Shape;

constexpr auto max = std::numeric_limits<std::size_t>::max();

static_assert(numel(Shape{}) == 1); // a scalar
static_assert(numel(Shape{2, 3, 4}) == 24);
static_assert(numel(Shape{max, max, 0}) == 0);
static_assert(joinable::row_major_strides(Shape{2, 3, 4}) == Shape{12, 4, 1});
static_assert(joinable::column_major_strides(Shape{2, 3, 4}) == Shape{1, 2, 6});
static_assert(joinable::column_major_strides(Shape{}) == Shape{});
static_assert(Shape{2, 3} != Shape{2, 3, 1} && Shape{2, 3} != Shape{3, 2});
static_assert(is_contiguous(Shape{}, Shape{}));
static_assert(is_contiguous(Shape{2, 3}, Shape{3, 1}));
static_assert(is_contiguous(Shape{1, 3, 1}, Shape{99, 1, 77})); // extents of 1 do not step
static_assert(is_contiguous(Shape{0, 3}, Shape{5, 5}));
static_assert(!is_contiguous(Shape{2, 3}, Shape{1, 2}));
static_assert(!is_contiguous(Shape{2, 3}, Shape{4, 1}));
static_assert(!is_contiguous(Shape{2}, Shape{0}));
static_assert(!is_contiguous(Shape{2, 3}, Shape{1}));

TEST_CASE("a shape holds eight numbers and refuses the ninth") {
    std::vector<std::size_t> const values{1, 2, 3, 4, 5, 6, 7, 8};
    Shape shape{std::span<std::size_t const>{values}};
    CHECK(std::vector<std::size_t>(shape.begin(), shape.end()) == values);
    CHECK_THROWS_WITH_AS(
        shape.push_back(9), "a tensor has at most 8 dimensions", ContractViolation
    );
    CHECK(shape.size() == 8);
}

TEST_CASE("a number of elements beyond std::size_t is refused, unless an extent is zero") {
    CHECK(numel(Shape{max}) == max);
    CHECK_THROWS_AS((void)numel(Shape{max, 2}), ContractViolation);
    CHECK_THROWS_AS((void)numel(Shape{max / 2 + 1, 2}), ContractViolation);
    CHECK(numel(Shape{max, 2, 0}) == 0);
}

} // namespace
