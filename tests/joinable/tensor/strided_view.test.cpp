// SPDX-License-Identifier: BSL-1.0
#include <joinable/tensor/strided_view.hpp>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <iterator>
#include <limits>
#include <numeric>
#include <ranges>
#include <span>
#include <vector>

#include <doctest/doctest.h>
#include <rapidcheck.h>
#include <support/offsets.hpp>

namespace {

using joinable::as_strided;
using joinable::ContractViolation;
using joinable::Shape;
using joinable::StridedView;
using joinable_tests::offsets_of;

static_assert(joinable::WritableTensor<StridedView<float>>);
static_assert(joinable::WritableTensor<StridedView<float> const>); // a view: shallow const
static_assert(joinable::Tensor<StridedView<float const>>);
static_assert(!joinable::WritableTensor<StridedView<float const>>);
static_assert(std::random_access_iterator<StridedView<int>::iterator>);
static_assert(!std::contiguous_iterator<StridedView<int>::iterator>);
static_assert(std::ranges::random_access_range<StridedView<int> const>);
static_assert(std::ranges::sized_range<StridedView<int> const>);
static_assert(std::ranges::common_range<StridedView<int> const>);
static_assert(std::same_as<std::iter_reference_t<StridedView<int const>::iterator>, int const&>);
static_assert(std::convertible_to<StridedView<int>, StridedView<int const>>);
static_assert(!std::convertible_to<StridedView<int const>, StridedView<int>>);

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

TEST_CASE("steps and extents that were negative are refused by their number") {
    float storage[4] = {};
    auto const minus_two = static_cast<std::size_t>(-2);
    CHECK_THROWS_WITH_AS(
        (StridedView<float>{storage, {2, 2}, {1, minus_two}}),
        "the stride of dimension 1 is -2, but must not be negative; start at the other end, or "
        "copy the tensor",
        ContractViolation
    );
    CHECK_THROWS_WITH_AS(
        (StridedView<float>{storage, {minus_two, 2}, {1, 1}}),
        "the extent of dimension 0 is -2, but must not be negative; start at the other end, or "
        "copy the tensor",
        ContractViolation
    );
    std::vector<std::size_t> const extents{2};
    std::vector<std::size_t> const strides{minus_two};
    CHECK_THROWS_AS(
        (void)as_strided(
            storage, std::span<std::size_t const>{extents}, std::span<std::size_t const>{strides}, 2
        ),
        ContractViolation
    );
}

TEST_CASE("extents times strides beyond memory are refused, with both numbers") {
    double storage[4] = {};
    constexpr std::size_t max = std::numeric_limits<std::size_t>::max() / 2; // bytes of an object
    CHECK_THROWS_WITH_AS(
        (StridedView<double>{storage, {3, 2}, {max / 16, 1}}),
        doctest::Contains("a view of extents (3, 2) and strides (576460752303423487, 1) reaches "
                          "further than memory can"),
        ContractViolation
    );
    CHECK(StridedView<double>{storage, {2, 2}, {max / 8 - 2, 1}}.numel() == 4); // the last that fit
    CHECK_THROWS_AS((StridedView<double>{storage, {2, 2}, {max / 8 - 1, 1}}), ContractViolation);
    // Elements that share memory take none, but are still counted by std::ptrdiff_t.
    CHECK_THROWS_AS((StridedView<double>{storage, {max, 3}, {0, 0}}), ContractViolation);
    CHECK_THROWS_AS((StridedView<double>{storage, {max, 2}, {0, 0}}), ContractViolation);
    CHECK(StridedView<double>{storage, {max}, {0}}.numel() == max);
    // Nothing is reached where an extent is zero, and an extent of 1 takes no step.
    StridedView<double> const none{storage, {0, 5}, {max, max}};
    CHECK(none.begin() == none.end());
    CHECK(StridedView<double>{storage, {1}, {max}}(0) == 0.0);
}

TEST_CASE("a view that was not given anything has no elements") {
    StridedView<float> const none;
    CHECK(none.numel() == 0);
    CHECK(none.begin() == none.end());
    CHECK(none.is_contiguous());
}

TEST_CASE("extents and strides come as spans as well, and storage as any contiguous range") {
    float array[6] = {0, 1, 2, 3, 4, 5};
    std::vector<std::size_t> const extents{3, 2};
    std::vector<std::size_t> const strides{1, 3};
    auto const view = as_strided(
        array, std::span<std::size_t const>{extents}, std::span<std::size_t const>{strides}
    );
    CHECK(view(2, 1) == 5.0F);
    CHECK(as_strided(std::span{array}, {2}, {1}, 4)(1) == 5.0F); // a temporary span owns nothing
}

TEST_CASE("elements of any view are those that nested loops over its indices find") {
    CHECK(rc::check([] {
        Shape extents;
        Shape strides;
        for (int d = *rc::gen::inRange(0, 6); d > 0; --d) {
            extents.push_back(*rc::gen::inRange<std::size_t>(0, 5));
            strides.push_back(*rc::gen::inRange<std::size_t>(0, 7));
        }
        auto const offset = *rc::gen::inRange<std::size_t>(0, 9);
        auto const offsets = offsets_of(extents, strides);
        std::size_t const reach =
            offsets.empty() ? 0 : *std::max_element(offsets.begin(), offsets.end()) + 1;
        std::vector<std::size_t> storage(offset + reach);
        std::iota(storage.begin(), storage.end(), std::size_t{0});
        auto const view = as_strided(
            storage,
            std::span<std::size_t const>{extents.data(), extents.size()},
            std::span<std::size_t const>{strides.data(), strides.size()},
            offset
        );
        RC_ASSERT(view.numel() == offsets.size());
        RC_ASSERT(static_cast<std::size_t>(view.end() - view.begin()) == offsets.size());
        std::size_t k = 0;
        for (std::size_t const element : view) {
            RC_ASSERT(element == offset + offsets[k]);
            RC_ASSERT(view.begin()[static_cast<std::ptrdiff_t>(k)] == element);
            ++k;
        }
        if (reach != 0) { // one element less, and the last one is out of bounds
            storage.pop_back();
            RC_ASSERT_THROWS_AS(
                (void)as_strided(
                    storage,
                    std::span<std::size_t const>{extents.data(), extents.size()},
                    std::span<std::size_t const>{strides.data(), strides.size()},
                    offset
                ),
                ContractViolation
            );
        }
    }));
}

} // namespace
