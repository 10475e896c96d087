// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <joinable/config.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/tensor.hpp>

namespace joinable { inline namespace v0 {

/// Whether a tensor's elements fill its memory without gaps or overlap, in any order of dimensions.
/// A flat buffer can then keep its strides. This is the rule of PyTorch's
/// is_non_overlapping_and_dense.
[[nodiscard]] bool is_non_overlapping_and_dense(Shape const& extents, Shape const& strides);

namespace detail {

/// The strides of a tensor in a flat buffer. A dense tensor keeps its own, so that both are read in
/// the same order; any other tensor becomes row-major.
[[nodiscard]] inline Shape dense_strides(Shape const& extents, Shape const& strides) {
    return is_non_overlapping_and_dense(extents, strides) ? strides : row_major_strides(extents);
}

/// Counts the ways in which `total` is a sum of multiples of strides, each taken less than `count`
/// times. This decides whether two indices name the same memory. It is a bounded Diophantine
/// equation, as in NumPy's solve_may_share_memory, and hard in general. Nested, permuted, sliced
/// and padded layouts take only a few steps, because the largest stride leaves few choices.
class SumsOfStrides {
public:
    /// Adds a stride that may be taken 0 to `count - 1` times. At most 18 strides.
    void add(std::size_t stride, std::size_t count) noexcept;

    /// Merges terms that have the same stride. This keeps the set of possible sums, but not the
    /// number of ways.
    void merge_equal_strides() noexcept;

    /// Whether there are at least `wanted` ways. Also true if the search took too many steps.
    [[nodiscard]] bool has(std::size_t total, int wanted) noexcept;

private:
    struct Term {
        std::size_t stride;
        std::size_t count;
        std::size_t rest;    ///< the largest sum of this term and the later ones
        std::size_t divisor; ///< common to all sums of this term and the later ones
    };
    static constexpr int max_steps = 10'000; ///< about half a millisecond

    void search(std::size_t i, std::size_t total) noexcept;

    std::array<Term, 2 * max_tensor_rank + 2> terms_{}; ///< of two views, and their elements' bytes
    std::size_t size_ = 0;
    int wanted_ = 0;
    int steps_ = 0;
};

bool is_overlapping(Shape const& extents, Shape const& strides);
/// The end of an error text about such a view, after its name: it cannot be `done_and_remedy`.
[[nodiscard]] std::string text_of_overlap(AnyView const& view, std::string_view done_and_remedy);

bool share_memory(AnyView const& a, AnyView const& b);

} // namespace detail

/// Whether two different indices of a tensor may name the same element, as with a stride of 0. Such
/// a tensor can be read, but writing all of its elements has no defined result. Local. The answer
/// is exact, except that a layout that takes more than 10,000 steps to decide counts as
/// overlapping. Layouts from slicing, padding, permuting and broadcasting take a few steps.
/// @throws ContractViolation  extents and strides do not describe a view; see StridedView.
template <Tensor T>
[[nodiscard]] bool is_overlapping(T const& tensor) {
    Shape const shape = joinable::extents(tensor);
    Shape const steps = joinable::strides(tensor);
    (void)detail::checked_reach(shape, steps, size_of(joinable::dtype(tensor)));
    return detail::is_overlapping(shape, steps);
}

/// Whether some element of one tensor may share memory with an element of the other. Local. The
/// tensors may differ in everything. The answer is exact like `is_overlapping`.
/// @throws ContractViolation  extents and strides do not describe a view; see StridedView.
template <Tensor A, Tensor B>
[[nodiscard]] bool share_memory(A const& a, B const& b) {
    return detail::share_memory(detail::source_view(a), detail::source_view(b));
}

namespace detail {

/// The bytes from a view's first element to its last one.
struct AddressRange {
    std::byte const* begin = nullptr; ///< null: it has no elements
    std::byte const* end = nullptr;
    std::size_t index = 0; ///< of the view

    static AddressRange of(AnyView const& view, std::size_t index = 0);
    /// Whether some byte is in both.
    [[nodiscard]] bool meets(AddressRange const& other) const noexcept {
        return std::less<>{}(begin, other.end) && std::less<>{}(other.begin, end);
    }
};

/// The indices of two views that share memory, the smaller one first, if `counts` of their indices
/// is true. Of several such pairs it is the least one. `view_of(index)` returns a view.
/// Complexity: sorts the ranges; compares views whose ranges overlap.
std::optional<std::pair<std::size_t, std::size_t>> find_shared(
    std::vector<AddressRange> ranges,
    std::function<AnyView(std::size_t)> const& view_of,
    std::function<bool(std::size_t, std::size_t)> const& counts
);
/// The same for the views of the indices below `count`.
std::optional<std::pair<std::size_t, std::size_t>> find_shared(
    std::size_t count,
    std::function<AnyView(std::size_t)> const& view_of,
    std::function<bool(std::size_t, std::size_t)> const& counts = [](std::size_t,
                                                                     std::size_t) { return true; }
);

} // namespace detail

}} // namespace joinable::v0

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/tensor/impl/overlap.ipp>
#endif
