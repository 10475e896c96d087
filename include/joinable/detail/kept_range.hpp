// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <iterator>
#include <type_traits>
#include <utility>

/// @file
/// The ways in which a view keeps the range it was made from.

namespace joinable { inline namespace v0 { namespace detail {

/// A reference to a named range, kept by address. One that refers to none is empty.
template <class Range>
class RangeReference {
public:
    RangeReference() = default;
    explicit constexpr RangeReference(Range& range) noexcept : range_{&range} {}
    [[nodiscard]] constexpr auto begin() const {
        return range_ == nullptr ? decltype(std::begin(*range_)){} : std::begin(*range_);
    }
    [[nodiscard]] constexpr auto end() const {
        return range_ == nullptr ? decltype(std::end(*range_)){} : std::end(*range_);
    }

private:
    Range* range_ = nullptr;
};

template <class Range>
inline constexpr bool is_view = std::ranges::enable_view<Range>;
template <class Range>
inline constexpr bool is_view<RangeReference<Range>> = true;

/// Whether iterators outlive the range object.
template <class Range>
inline constexpr bool is_borrowed = std::ranges::enable_borrowed_range<Range>;
template <class Range>
inline constexpr bool is_borrowed<RangeReference<Range>> = true;

/// The type that keeps an argument of type `Range&&`: a named container is referenced, a view is
/// copied, a temporary container is moved.
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
