// SPDX-License-Identifier: BSL-1.0
// Strided views and their parts against range-v3's: iota, stride, cartesian_product.
#include <joinable/tensor/strided_view.hpp>

#include <array>
#include <cstddef>
#include <tuple>
#include <vector>

#include <doctest/doctest.h>
#include <range/v3/algorithm/equal.hpp>
#include <range/v3/range/conversion.hpp>
#include <range/v3/view/cartesian_product.hpp>
#include <range/v3/view/drop.hpp>
#include <range/v3/view/filter.hpp>
#include <range/v3/view/iota.hpp>
#include <range/v3/view/stride.hpp>
#include <range/v3/view/transform.hpp>
#include <rapidcheck.h>

namespace {

namespace rv = ranges::views;
using joinable::Shape;

TEST_CASE("a column of a matrix is its storage from the column on, a row apart") {
    CHECK(rc::check([] {
        auto const rows = *rc::gen::inRange<std::size_t>(1, 8);
        auto const columns = *rc::gen::inRange<std::size_t>(1, 8);
        auto const column = *rc::gen::inRange<std::size_t>(0, columns);
        auto storage = rv::iota(std::size_t{0}, rows * columns) | ranges::to<std::vector>;
        auto const matrix = joinable::as_strided(storage, {rows, columns}, {columns, 1});
        RC_ASSERT(ranges::equal(
            joinable::narrow(matrix, 1, column, 1),
            storage | rv::drop(static_cast<std::ptrdiff_t>(column)) |
                rv::stride(static_cast<std::ptrdiff_t>(columns))
        ));
    }));
}

TEST_CASE("a narrowed view has the elements whose index is in the range, in the same order") {
    CHECK(rc::check([] {
        auto const extent = rc::gen::inRange<std::size_t>(1, 5);
        std::array<std::size_t, 3> const extents{*extent, *extent, *extent};
        auto const dimension = *rc::gen::inRange<std::size_t>(0, 3);
        auto const start = *rc::gen::inRange<std::size_t>(0, extents[dimension] + 1);
        auto const length = *rc::gen::inRange<std::size_t>(0, extents[dimension] - start + 1);
        auto storage = rv::iota(0, 1000) | ranges::to<std::vector>;
        auto const view =
            joinable::as_strided(storage, {extents[0], extents[1], extents[2]}, {1, 70, 9});
        auto const part = joinable::narrow(view, dimension, start, length);
        auto const all = [&](std::size_t d) { return rv::iota(std::size_t{0}, extents[d]); };
        RC_ASSERT(ranges::equal(
            part,
            rv::cartesian_product(all(0), all(1), all(2)) | rv::filter([&](auto const& index) {
                auto const [i, j, k] = index;
                auto const in_dimension = std::array{i, j, k}[dimension];
                return in_dimension >= start && in_dimension < start + length;
            }) | rv::transform([](auto const& index) {
                auto const [i, j, k] = index;
                return static_cast<int>(i + 70 * j + 9 * k);
            })
        ));
    }));
}

} // namespace
