// SPDX-License-Identifier: BSL-1.0
#include <joinable/bucket/assignment.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

#include <algorithm>
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

/// How a program keeps an assignment as a constexpr variable: of at most `Capacity` tensors, without
/// allocations. A BucketAssignment exists only during the evaluation of a constant expression.
template <std::size_t Capacity>
class FixedBucketAssignment {
public:
    /// @throws ContractViolation  there are more tensors than the capacity.
    explicit constexpr FixedBucketAssignment(joinable::BucketAssignment const& assignment) {
        for (auto const& members : assignment.buckets) {
            if (members.size() > Capacity - starts_[size_]) {
                throw joinable::ContractViolation{joinable::detail::concat(
                    "a fixed bucket assignment has room for ",
                    Capacity,
                    " tensors, but the one it was given has more; raise its capacity"
                )};
            }
            limits_[size_] = assignment.limits[size_];
            starts_[size_ + 1] = starts_[size_] + members.size();
            std::copy(members.begin(), members.end(), tensors_.data() + starts_[size_]);
            ++size_;
        }
    }

    /// The number of buckets.
    [[nodiscard]] constexpr std::size_t size() const noexcept { return size_; }
    /// The tensors of bucket `b`. @pre b < size()
    [[nodiscard]] constexpr std::span<std::size_t const> operator[](std::size_t b) const noexcept {
        return {tensors_.data() + starts_[b], starts_[b + 1] - starts_[b]};
    }
    /// The limit in bytes that each bucket was cut by, as in BucketAssignment.
    [[nodiscard]] constexpr std::span<std::size_t const> limits() const noexcept {
        return {limits_.data(), size_};
    }

private:
    std::array<std::size_t, Capacity> tensors_{}; ///< of all buckets, one after another
    std::array<std::size_t, Capacity + 1> starts_{};
    std::array<std::size_t, Capacity> limits_{};
    std::size_t size_ = 0;
};

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
