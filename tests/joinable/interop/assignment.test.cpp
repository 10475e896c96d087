// SPDX-License-Identifier: BSL-1.0
// Bucket assignment against what range-v3's views make of the same tensors.
#include <joinable/bucket/assignment.hpp>

#include <cstddef>
#include <vector>

#include <doctest/doctest.h>
#include <range/v3/action/sort.hpp>
#include <range/v3/algorithm/equal.hpp>
#include <range/v3/range/conversion.hpp>
#include <range/v3/view/chunk.hpp>
#include <range/v3/view/iota.hpp>
#include <range/v3/view/join.hpp>
#include <rapidcheck.h>
#include <support/tensor_sizes.hpp>

namespace {

namespace rv = ranges::views;
using joinable::TensorSize;

TEST_CASE("every tensor is in one bucket") {
    CHECK(rc::check([] {
        joinable_tests::AssignmentInput const input;
        auto const result = input.assign();
        RC_ASSERT(ranges::equal(
            result.buckets | rv::join | ranges::to<std::vector> | ranges::actions::sort,
            rv::iota(std::size_t{0}, input.sizes.size())
        ));
    }));
}

TEST_CASE("tensors of one size are cut into chunks of as many as reach the limit") {
    CHECK(rc::check([] {
        auto const count = *rc::gen::inRange<std::size_t>(1, 100);
        auto const numel = *rc::gen::inRange<std::size_t>(1, 50);
        auto const together = *rc::gen::inRange<std::ptrdiff_t>(1, 20);
        std::vector<TensorSize> const sizes(count, TensorSize{numel});
        std::size_t const limit = (static_cast<std::size_t>(together) * numel - numel) * 4 + 1;
        RC_ASSERT(ranges::equal(
            joinable::compute_bucket_assignment_by_size(sizes, {limit}).buckets,
            rv::iota(std::size_t{0}, count) | rv::chunk(together),
            ranges::equal
        ));
    }));
}

} // namespace
