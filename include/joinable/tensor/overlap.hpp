// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include <joinable/config.hpp>
#include <joinable/tensor/tensor.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

/// The dimensions of extent above 1, those with the smallest stride first.
Shape dimensions_by_stride(Shape const& extents, Shape const& strides);

} // namespace detail

/// Whether a tensor's elements fill its memory without gaps or overlap, in whatever order of
/// dimensions: then its strides can be kept in a flat buffer. The rule of PyTorch's
/// is_non_overlapping_and_dense.
[[nodiscard]] bool is_non_overlapping_and_dense(Shape const& extents, Shape const& strides);

namespace detail {

/// How a tensor is laid out in a flat buffer: as it is where it is dense, so that both are read in the same
/// order; else row-major.
[[nodiscard]] inline Shape dense_strides(Shape const& extents, Shape const& strides) {
    return is_non_overlapping_and_dense(extents, strides) ? strides : row_major_strides(extents);
}

/// In how many ways `total` is a sum of multiples of strides, each taken less than `count` times:
/// the equation behind "do two indices name the same memory?". A bounded Diophantine equation, as
/// in NumPy's solve_may_share_memory: hard in general, but every layout that is nested, permuted,
/// sliced or padded is decided in a few steps, because the largest stride leaves few choices.
class SumsOfStrides {
public:
    /// Adds a stride that may be taken 0 to `count - 1` times. At most 16 of them.
    void add(std::size_t stride, std::size_t count) noexcept;

    /// One term per stride. It keeps the sums there are, but not in how many ways they come.
    void merge_equal_strides() noexcept;

    /// Whether there are at least `wanted` ways. Also true when the search took too many steps.
    [[nodiscard]] bool has(std::size_t total, int wanted) noexcept;

private:
    struct Term {
        std::size_t stride;
        std::size_t count;
        std::size_t rest;    ///< the largest sum of this term and those after it
        std::size_t divisor; ///< of every sum of this term and those after it
    };
    static constexpr int max_steps = 10'000; ///< about half a millisecond

    void sort() noexcept;

    void search(std::size_t i, std::size_t total) noexcept;

    std::array<Term, 2 * max_tensor_rank> terms_{};
    std::size_t size_ = 0;
    int wanted_ = 0;
    int steps_ = 0;
};

/// Whether each stride is larger than all that the smaller ones reach: then no two indices meet.
bool is_nested(Shape const& extents, Shape const& strides);

bool is_overlapping(Shape const& extents, Shape const& strides);

} // namespace detail

/// Whether two different indices of a tensor may name the same element, as where a stride is 0: such
/// a tensor can be read, but writing all of its elements has no defined result. Local.
/// Exact, except that a tensor whose layout takes more than 10,000 steps to decide counts as
/// overlapping; all that come from slicing, padding, permuting and broadcasting take a few.
/// @throws ContractViolation  extents and strides are none of a view, see StridedView.
template <Tensor T>
[[nodiscard]] bool is_overlapping(T const& tensor) {
    Shape const shape = joinable::extents(tensor);
    Shape const steps = joinable::strides(tensor);
    (void)detail::checked_reach(shape, steps, size_of(joinable::dtype(tensor)));
    return detail::is_overlapping(shape, steps);
}

/// Whether some element of one tensor may be in the memory of an element of the other. Local; the
/// tensors may differ in everything. Exact like `is_overlapping` where both have elements of the same
/// size at a multiple of it; else overlapping address ranges count.
/// @throws ContractViolation  extents and strides are none of a view, see StridedView.
template <Tensor A, Tensor B>
[[nodiscard]] bool share_memory(A const& a, B const& b) {
    Shape const extents_a = joinable::extents(a);
    Shape const extents_b = joinable::extents(b);
    Shape const strides_a = joinable::strides(a);
    Shape const strides_b = joinable::strides(b);
    std::size_t const size = size_of(joinable::dtype(a));
    std::size_t const size_b = size_of(joinable::dtype(b));
    std::size_t const reach_a = detail::checked_reach(extents_a, strides_a, size);
    std::size_t const reach_b = detail::checked_reach(extents_b, strides_b, size_b);
    void const* const data_a = detail::traits_of<A const>::data(a);
    void const* const data_b = detail::traits_of<B const>::data(b);
    auto const first_a = reinterpret_cast<std::uintptr_t>(data_a);
    auto const first_b = reinterpret_cast<std::uintptr_t>(data_b);
    if (joinable::device(a) != joinable::device(b) || first_a >= first_b + reach_b * size_b ||
        first_b >= first_a + reach_a * size || reach_a == 0 || reach_b == 0) {
        return false;
    }
    // Modulo 2^64 the difference may be negative: what b reaches makes up for it below.
    std::size_t const difference = first_b - first_a;
    if (size != size_b || difference % size != 0) {
        return true;
    }
    // Element i of a is element k of b where a's steps up to i and b's from k to its last element
    // are together the distance from a's first element to b's last one.
    detail::SumsOfStrides sums;
    std::size_t total =
        first_b >= first_a ? difference / size : std::size_t{0} - (first_a - first_b) / size;
    for (std::size_t d = 0; d < extents_a.size(); ++d) {
        sums.add(strides_a[d], extents_a[d]);
    }
    for (std::size_t d = 0; d < extents_b.size(); ++d) {
        sums.add(strides_b[d], extents_b[d]);
        total += strides_b[d] * (extents_b[d] - 1);
    }
    sums.merge_equal_strides();
    return sums.has(total, 1);
}

}} // namespace joinable::v0

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/tensor/overlap.ipp>
#endif
