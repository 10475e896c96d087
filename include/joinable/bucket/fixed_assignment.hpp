// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>

#include <joinable/bucket/assignment.hpp>

namespace joinable { inline namespace v0 {

/// A bucket assignment of at most `Capacity` tensors that does not allocate, so that it can be a
/// constexpr variable. A BucketAssignment exists only during the evaluation of a constant
/// expression.
///
///     constexpr std::array<TensorSize, 3> sizes{{{10}, {10}, {5, DType::f64}}};
///     constexpr FixedBucketAssignment<3> layout{compute_bucket_assignment_by_size(sizes, {80})};
template <std::size_t Capacity>
class FixedBucketAssignment {
public:
    /// @throws ContractViolation  there are more tensors than the capacity.
    explicit constexpr FixedBucketAssignment(BucketAssignment const& assignment) {
        for (auto const& members : assignment.buckets) {
            if (members.size() > Capacity - starts_[size_]) {
                throw ContractViolation{detail::concat(
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

}} // namespace joinable::v0
