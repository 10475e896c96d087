// SPDX-License-Identifier: BSL-1.0
#include <joinable/bucket/assignment.hpp>

#include <array>
#include <cstddef>
#include <span>
#include <vector>

#include <doctest/doctest.h>
#include <rapidcheck.h>
#include <support/tensor_sizes.hpp>

namespace {

using joinable::compute_bucket_assignment_by_size;
using joinable::DType;
using joinable::TensorSize;
using joinable::detail::FixedBucketAssignment;

// Upstream's "several limits, several dtypes", as a variable that the compiler computes.
constexpr std::array<TensorSize, 6> sizes{
    {{50, DType::f32},
     {25, DType::f64},
     {50, DType::f32},
     {25, DType::f64},
     {50, DType::f32},
     {25, DType::f64}}
};
constexpr FixedBucketAssignment<6> layout{compute_bucket_assignment_by_size(sizes, {200, 400})};
static_assert(layout.size() == 4);
static_assert(layout[0].size() == 1 && layout[0][0] == 0);
static_assert(layout[1].size() == 1 && layout[1][0] == 1);
static_assert(layout[2].size() == 2 && layout[2][0] == 2 && layout[2][1] == 4);
static_assert(layout[3].size() == 2 && layout[3][0] == 3 && layout[3][1] == 5);
static_assert(layout.limits().size() == 4 && layout.limits()[0] == 200);
static_assert(layout.limits()[1] == 200 && layout.limits()[2] == 400 && layout.limits()[3] == 400);

TEST_CASE("a fixed assignment holds the same buckets and limits, in the same order") {
    CHECK(rc::check([] {
        auto tensors = joinable_tests::random_sizes();
        constexpr std::size_t capacity = 200;
        tensors.resize(std::min(tensors.size(), capacity));
        auto const limits = joinable_tests::random_limits();
        auto const assignment =
            compute_bucket_assignment_by_size(tensors, std::span<std::size_t const>{limits});
        FixedBucketAssignment<capacity> const fixed{assignment};
        RC_ASSERT(fixed.size() == assignment.buckets.size());
        for (std::size_t b = 0; b < fixed.size(); ++b) {
            RC_ASSERT(
                std::vector<std::size_t>(fixed[b].begin(), fixed[b].end()) == assignment.buckets[b]
            );
        }
        RC_ASSERT(
            std::vector<std::size_t>(fixed.limits().begin(), fixed.limits().end()) ==
            assignment.limits
        );
    }));
}

TEST_CASE("a fixed assignment is full with as many tensors as its capacity, and refuses more") {
    auto const three = compute_bucket_assignment_by_size(std::vector<TensorSize>(3, {10}), {80});
    CHECK(FixedBucketAssignment<3>{three}.size() == 2);
    CHECK_THROWS_WITH_AS(
        FixedBucketAssignment<2>{three},
        doctest::Contains("room for 2 tensors"),
        joinable::ContractViolation
    );
}

} // namespace
