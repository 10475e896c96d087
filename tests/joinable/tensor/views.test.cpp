// SPDX-License-Identifier: BSL-1.0
#include <joinable/tensor/copy.hpp>

#include <array>
#include <cstddef>
#include <iterator>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include <doctest/doctest.h>
#include <rapidcheck.h>

namespace {

using joinable::AnyView;
using joinable::as_strided;
using joinable::ContractViolation;
using joinable::DType;
using joinable::Shape;
using joinable::StridedView;

static_assert(joinable::WritableTensor<StridedView<float>>);
static_assert(joinable::Tensor<StridedView<float const>>);
static_assert(!joinable::WritableTensor<StridedView<float const>>);
static_assert(joinable::WritableTensor<AnyView const>);
static_assert(joinable::WritableTensor<std::vector<double>>);
static_assert(!joinable::WritableTensor<std::vector<double> const>);
static_assert(joinable::Tensor<std::array<int, 3> const>);
static_assert(joinable::WritableTensor<std::span<float> const>);
static_assert(!joinable::WritableTensor<std::span<float const>>);
static_assert(!joinable::Tensor<std::vector<bool>>);
static_assert(!joinable::Tensor<int>);
static_assert(std::random_access_iterator<StridedView<int>::iterator>);

TEST_CASE("a strided view reads rows, columns, parts and scalars of one storage") {
    std::vector<int> storage(12);
    std::iota(storage.begin(), storage.end(), 0);
    auto const matrix = as_strided(storage, {3, 4}, {4, 1});
    auto const columns = as_strided(storage, {4, 3}, {1, 4});
    auto const middle = joinable::narrow(matrix, 1, 1, 2);
    auto const scalar = as_strided(storage, {}, {}, 7);
    CHECK(matrix(2, 1) == 9);
    CHECK(columns(1, 2) == 9);
    CHECK(std::vector<int>(middle.begin(), middle.end()) == std::vector{1, 2, 5, 6, 9, 10});
    CHECK(middle.begin()[4] == 9);
    CHECK(scalar() == 7);
    CHECK(matrix.is_contiguous());
    CHECK_FALSE(columns.is_contiguous());
    CHECK(joinable::narrow(matrix, 0, 3, 0).numel() == 0);
    columns(0, 0) = 42;
    CHECK(storage[0] == 42);
    std::vector<int> const read_only(3);
    static_assert(std::same_as<decltype(as_strided(read_only, {3}, {1})), StridedView<int const>>);
}

TEST_CASE("views beyond their storage are refused, however they get there") {
    std::vector<int> storage(12);
    constexpr auto max = std::numeric_limits<std::size_t>::max();
    CHECK_THROWS_WITH_AS(
        (void)as_strided(storage, {3, 4}, {4, 1}, 1),
        "a strided view needs 12 elements from offset 1 on, but the storage has 12; make extents, "
        "strides or the offset smaller",
        ContractViolation
    );
    CHECK_THROWS_AS((void)as_strided(storage, {2}, {12}), ContractViolation);
    CHECK_THROWS_AS((void)as_strided(storage, {2, 2}, {1}), ContractViolation);
    CHECK_THROWS_AS((void)as_strided(storage, {max, 2}, {1, 1}), ContractViolation);
    CHECK_THROWS_AS((void)as_strided(storage, {3}, {max / 2 + 1}), ContractViolation);
    CHECK_THROWS_AS((void)as_strided(storage, {1}, {1}, max), ContractViolation);
    CHECK_THROWS_AS(
        (void)as_strided(storage, {1, 1, 1, 1, 1, 1, 1, 1, 1}, {1, 1, 1, 1, 1, 1, 1, 1, 1}),
        ContractViolation
    );
    CHECK(as_strided(storage, {0, 5}, {1, 1}, 12).numel() == 0);
    auto const view = as_strided(storage, {3, 4}, {4, 1});
    CHECK_THROWS_AS((void)joinable::narrow(view, 2, 0, 1), ContractViolation);
    CHECK_THROWS_AS((void)joinable::narrow(view, 0, 2, 2), ContractViolation);
    CHECK_THROWS_AS((void)joinable::narrow(view, 0, max, 2), ContractViolation);
    CHECK_THROWS_AS((void)view(1), ContractViolation);
}

TEST_CASE("a view of any dtype knows its own, and refuses another") {
    std::vector<double> storage(6, 1.5);
    AnyView const view{storage};
    CHECK(view);
    CHECK_FALSE(AnyView{});
    CHECK(view.dtype() == DType::f64);
    CHECK(view.as<double>()(5) == 1.5);
    CHECK_THROWS_WITH_AS(
        (void)view.as<float>(),
        "a tensor of f64 was asked for its elements as f32",
        ContractViolation
    );
}

TEST_CASE("a collective's buffer is taken from a contiguous tensor only") {
    std::vector<float> storage(6);
    CHECK(joinable::to_buffer(storage).count == 6);
    auto const column = as_strided(storage, {3}, {2});
    CHECK_THROWS_AS((void)joinable::to_buffer(column), ContractViolation);
}

TEST_CASE("non-overlapping and dense: no gaps, no overlap, any order of dimensions") {
    using joinable::is_non_overlapping_and_dense;
    CHECK(is_non_overlapping_and_dense({2, 3}, {3, 1}));
    CHECK(is_non_overlapping_and_dense({2, 3}, {1, 2}));
    CHECK(is_non_overlapping_and_dense({2, 3, 4}, {1, 8, 2}));
    CHECK(is_non_overlapping_and_dense({1, 3}, {99, 1}));
    CHECK(is_non_overlapping_and_dense({}, {}));
    CHECK(is_non_overlapping_and_dense({0, 3}, {7, 7}));
    CHECK_FALSE(is_non_overlapping_and_dense({2, 3}, {4, 1}));
    CHECK_FALSE(is_non_overlapping_and_dense({3}, {0}));
    CHECK_FALSE(is_non_overlapping_and_dense({2, 3}, {1, 1}));
}

/// A random layout of `extents`: permuted dense strides, times a random gap.
Shape random_strides(Shape const& extents) {
    Shape strides = extents;
    std::vector<std::size_t> order(extents.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    for (std::size_t i = order.size(); i > 1; --i) {
        std::swap(order[i - 1], order[*rc::gen::inRange<std::size_t>(0, i)]);
    }
    std::size_t stride = *rc::gen::inRange<std::size_t>(1, 3);
    for (std::size_t const d : order) {
        strides[d] = stride;
        stride *= std::max<std::size_t>(extents[d], 1) + *rc::gen::inRange<std::size_t>(0, 2);
    }
    return strides;
}

TEST_CASE("copies between any two layouts equal a loop over all indices") {
    CHECK(rc::check([] {
        Shape extents;
        for (int d = *rc::gen::inRange(0, 5); d > 0; --d) {
            extents.push_back(*rc::gen::inRange<std::size_t>(0, 5));
        }
        Shape const from_strides = random_strides(extents);
        Shape const to_strides =
            *rc::gen::arbitrary<bool>() ? from_strides : random_strides(extents);
        std::vector<float> from(4096);
        std::iota(from.begin(), from.end(), 1.0F);
        AnyView const source{from.data(), DType::f32, extents, from_strides};
        for (double const factor : {1.0, 0.25}) {
            std::vector<float> to(4096, -1.0F);
            std::vector<float> expected = to;
            AnyView const target{to.data(), DType::f32, extents, to_strides};
            std::size_t const count = joinable::numel(extents);
            for (std::size_t k = 0; k < count; ++k) { // indices of element k, last one fastest
                std::size_t rest = k;
                std::size_t a = 0;
                std::size_t b = 0;
                for (std::size_t d = extents.size(); d-- > 0;) {
                    a += rest % extents[d] * from_strides[d];
                    b += rest % extents[d] * to_strides[d];
                    rest /= extents[d];
                }
                expected[b] = from[a] * static_cast<float>(factor);
            }
            joinable::scale_copy(source, factor, target);
            RC_ASSERT(to == expected);
            joinable::fill_zero(target);
            for (std::size_t i = 0; i < to.size(); ++i) {
                RC_ASSERT(to[i] == (expected[i] == -1.0F ? -1.0F : 0.0F));
            }
        }
    }));
}

TEST_CASE("scaling rounds once in 16 bits, works in place, and refuses integers") {
    std::vector<joinable::BFloat16> small(3, joinable::BFloat16{3.0F});
    joinable::scale_copy(AnyView{small}, 0.5, AnyView{small});
    CHECK(static_cast<float>(small[2]) == 1.5F);
    std::vector<int> numbers(3, 4);
    joinable::scale_copy(AnyView{numbers}, 1.0, AnyView{numbers});
    CHECK_THROWS_AS(
        joinable::scale_copy(AnyView{numbers}, 0.5, AnyView{numbers}), ContractViolation
    );
    std::vector<float> other(3);
    CHECK_THROWS_AS(joinable::copy(AnyView{numbers}, AnyView{other}), ContractViolation);
    CHECK_THROWS_AS(joinable::copy(AnyView{}, AnyView{other}), ContractViolation);
}

} // namespace
