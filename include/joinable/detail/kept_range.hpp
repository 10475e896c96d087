// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <iterator>
#include <type_traits>
#include <utility>

/// @file
/// How a view keeps the range that it was made from.

namespace joinable { inline namespace v0 { namespace detail {

/// A named range, kept by its address.
template <class Range>
class RangeReference {
public:
    RangeReference() = default;
    explicit constexpr RangeReference(Range& range) noexcept : range_{&range} {}
    [[nodiscard]] constexpr auto begin() const { return std::begin(*range_); }
    [[nodiscard]] constexpr auto end() const { return std::end(*range_); }

private:
    Range* range_ = nullptr;
};

template <class Range>
inline constexpr bool is_view = std::ranges::enable_view<Range>;
template <class Range>
inline constexpr bool is_view<RangeReference<Range>> = true;

/// Whether iterators outlive the object that they come from.
template <class Range>
inline constexpr bool is_borrowed = std::ranges::enable_borrowed_range<Range>;
template <class Range>
inline constexpr bool is_borrowed<RangeReference<Range>> = true;

/// What keeps an argument of type `Range&&`: a named container is referred to, a view is copied, a
/// temporary container is moved.
template <class Range>
using Kept = std::conditional_t<
    std::is_lvalue_reference_v<Range> && !is_view<std::remove_cvref_t<Range>>,
    RangeReference<std::remove_reference_t<Range>>,
    std::remove_cvref_t<Range>>;

template <class Range>
[[nodiscard]] constexpr Kept<Range> keep(Range&& range) {
    return Kept<Range>(std::forward<Range>(range));
}

}}} // namespace joinable::v0::detail
