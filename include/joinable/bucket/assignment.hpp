// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <iterator>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include <joinable/bucket/tensor_size.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 {

/// The tensors of each bucket, and the limit in bytes that the bucket was cut by (0 for a sparse
/// tensor, which has a bucket of its own).
struct BucketAssignment {
    std::vector<std::vector<std::size_t>> buckets;
    std::vector<std::size_t> limits;
};

namespace detail {

constexpr void check_assignment_input(
    std::size_t count,
    std::span<std::size_t const> limits,
    std::span<bool const> expect_sparse,
    std::span<std::size_t const> indices
) {
    if (count == 0 || limits.empty()) {
        throw ContractViolation{concat(
            "bucket assignment needs at least one tensor and one limit, but got ",
            count,
            " tensors and ",
            limits.size(),
            " limits"
        )};
    }
    if ((!expect_sparse.empty() && expect_sparse.size() != count) ||
        (!indices.empty() && indices.size() != count)) {
        throw ContractViolation{concat(
            "bucket assignment of ",
            count,
            " tensors needs as many sparse flags and indices, or none, but got ",
            expect_sparse.size(),
            " flags and ",
            indices.size(),
            " indices"
        )};
    }
    // Vectors are filled with a value: what libstdc++ 12 does without one is not a constant
    // expression for clang, and neither is its std::vector<bool>.
    std::vector<unsigned char> seen(indices.empty() ? 0 : count, 0);
    for (std::size_t const index : indices) {
        if (index >= count || seen[index]) {
            throw ContractViolation{concat(
                "bucket assignment: index ",
                index,
                index >= count ? " is out of range for " : " is given twice for ",
                count,
                " tensors; give a permutation"
            )};
        }
        seen[index] = 1;
    }
}

} // namespace detail

/// Cuts tensors into buckets of one dtype and device each, in order. A bucket closes after the
/// tensor with which it reaches its limit in bytes. The next bucket of that dtype and device gets
/// the next limit; the last limit repeats. Tensors flagged in `expect_sparse` are alone in their
/// buckets.
///
/// `indices` permutes the order in which tensors are taken. Without it buckets are sorted by their
/// lowest tensor. With it they stay in the order in which they closed; buckets left open at the end
/// follow in the order of the first tensor of their dtype and device. So the result is the same
/// everywhere. Local; also in constant expressions. `tensors` is a random-access range of Tensors,
/// Parameters or TensorSizes. The rule is that of PyTorch's _compute_bucket_assignment_by_size.
/// Complexity: linear in the tensors times the number of different dtypes and devices.
/// @throws ContractViolation  there are no tensors or limits, sizes differ, or the indices are not
///         a permutation.
template <class Tensors>
[[nodiscard]] constexpr BucketAssignment compute_bucket_assignment_by_size(
    Tensors const& tensors,
    std::span<std::size_t const> limits,
    std::span<bool const> expect_sparse = {},
    std::span<std::size_t const> indices = {}
) {
    static_assert(
        detail::has_tensor_size<decltype(*std::begin(tensors))>,
        "compute_bucket_assignment_by_size: the elements of the range must model Tensor or "
        "Parameter, or be a TensorSize; specialise joinable::tensor_traits for their type"
    );
    struct Open {
        TensorSize kind; ///< the first tensor's dtype and device
        std::size_t limit_index = 0;
        std::size_t bytes = 0;
        std::vector<std::size_t> members;
    };
    std::size_t const count = static_cast<std::size_t>(std::size(tensors));
    detail::check_assignment_input(count, limits, expect_sparse, indices);
    BucketAssignment result;
    std::vector<Open> open; // few dtypes and devices: a linear search beats hashing
    auto const close = [&](Open& group) {
        result.buckets.push_back(std::exchange(group.members, {}));
        result.limits.push_back(limits[group.limit_index]);
        group.bytes = 0;
        group.limit_index = (std::min)(group.limit_index + 1, limits.size() - 1);
    };
    auto const first = std::begin(tensors);
    for (std::size_t i = 0; i < count; ++i) {
        std::size_t const t = indices.empty() ? i : indices[i];
        if (!expect_sparse.empty() && expect_sparse[t]) {
            result.buckets.push_back({t});
            result.limits.push_back(0);
            continue;
        }
        auto const size = detail::tensor_size_of(first[static_cast<std::ptrdiff_t>(t)]);
        auto group = std::find_if(open.begin(), open.end(), [&](Open const& candidate) {
            return candidate.kind.shares_buckets_with(size);
        });
        if (group == open.end()) {
            open.push_back({size, 0, 0, {}});
            group = std::prev(open.end());
        }
        group->members.push_back(t);
        group->bytes += size.bytes();
        if (group->bytes >= limits[group->limit_index]) {
            close(*group);
        }
    }
    for (Open& group : open) {
        if (!group.members.empty()) {
            close(group);
        }
    }
    if (indices.empty()) {
        std::vector<std::size_t> order(result.buckets.size(), 0);
        std::iota(order.begin(), order.end(), std::size_t{0});
        std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
            return result.buckets[a].front() < result.buckets[b].front(); // ascending inside
        });
        BucketAssignment sorted;
        for (std::size_t const b : order) {
            sorted.buckets.push_back(std::move(result.buckets[b]));
            sorted.limits.push_back(result.limits[b]);
        }
        return sorted;
    }
    return result;
}

template <class Tensors>
[[nodiscard]] constexpr BucketAssignment compute_bucket_assignment_by_size(
    Tensors const& tensors,
    std::initializer_list<std::size_t> limits,
    std::initializer_list<bool> expect_sparse = {},
    std::initializer_list<std::size_t> indices = {}
) {
    return compute_bucket_assignment_by_size(
        tensors,
        std::span<std::size_t const>{limits.begin(), limits.size()},
        std::span<bool const>{expect_sparse.begin(), expect_sparse.size()},
        std::span<std::size_t const>{indices.begin(), indices.size()}
    );
}

}} // namespace joinable::v0
