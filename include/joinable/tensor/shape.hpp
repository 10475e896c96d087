// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cstddef>
#include <initializer_list>
#include <limits>
#include <span>
#include <string>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 {

/// The maximum number of dimensions of a tensor.
inline constexpr std::size_t max_tensor_rank = 8;

/// The extents or the strides of a tensor: a list of at most `max_tensor_rank` numbers that never
/// allocates. A scalar has none.
class Shape {
public:
    constexpr Shape() = default;
    constexpr Shape(std::initializer_list<std::size_t> values)
        : Shape{std::span<std::size_t const>{values.begin(), values.size()}} {}

    /// @throws ContractViolation  more than `max_tensor_rank` values.
    explicit constexpr Shape(std::span<std::size_t const> values) {
        for (std::size_t const value : values) {
            push_back(value);
        }
    }

    constexpr void push_back(std::size_t value) {
        if (rank_ == max_tensor_rank) {
            refuse_more(); // apart, so that compilers put the rest into its callers
        }
        values_[rank_++] = value;
    }

    [[nodiscard]] constexpr std::size_t size() const noexcept { return rank_; }
    [[nodiscard]] constexpr bool empty() const noexcept { return rank_ == 0; }
    constexpr std::size_t& operator[](std::size_t i) noexcept { return values_[i]; }
    constexpr std::size_t operator[](std::size_t i) const noexcept { return values_[i]; }
    [[nodiscard]] constexpr std::size_t const* begin() const noexcept { return values_.data(); }
    [[nodiscard]] constexpr std::size_t const* end() const noexcept {
        return values_.data() + rank_;
    }
    [[nodiscard]] constexpr std::size_t const* data() const noexcept { return values_.data(); }

    friend constexpr bool operator==(Shape const&, Shape const&) = default;

private:
    [[noreturn]] static void refuse_more() {
        throw ContractViolation{
            detail::concat("a tensor has at most ", max_tensor_rank, " dimensions")
        };
    }

    std::array<std::size_t, max_tensor_rank> values_{}; ///< zeros from rank_ on
    std::size_t rank_ = 0;
};

/// The number of elements: the product of the extents, 1 for a scalar.
/// @throws ContractViolation  the product does not fit in std::size_t.
[[nodiscard]] constexpr std::size_t numel(Shape const& extents) {
    std::size_t product = 1;
    bool overflow = false;
    for (std::size_t const extent : extents) {
        if (extent == 0) {
            return 0;
        }
        overflow |= __builtin_mul_overflow(product, extent, &product);
    }
    if (overflow) {
        throw ContractViolation{"the product of a tensor's extents does not fit in std::size_t"};
    }
    return product;
}

/// The strides, in elements, of a dense tensor whose last dimension varies fastest.
[[nodiscard]] constexpr Shape row_major_strides(Shape const& extents) {
    Shape strides = extents;
    std::size_t stride = 1;
    for (std::size_t i = extents.size(); i-- > 0;) {
        strides[i] = stride;
        stride *= extents[i];
    }
    return strides;
}

namespace detail {

/// The same numbers in reverse order.
[[nodiscard]] constexpr Shape reversed(Shape const& shape) {
    Shape other;
    for (std::size_t i = shape.size(); i-- > 0;) {
        other.push_back(shape[i]);
    }
    return other;
}

} // namespace detail

/// The strides, in elements, of a dense tensor whose first dimension varies fastest.
[[nodiscard]] constexpr Shape column_major_strides(Shape const& extents) {
    return detail::reversed(row_major_strides(detail::reversed(extents)));
}

/// Whether elements lie one after another in row-major order. Strides of dimensions of extent 1 do
/// not matter. A tensor without elements is contiguous.
[[nodiscard]] constexpr bool is_contiguous(Shape const& extents, Shape const& strides) {
    if (extents.size() != strides.size()) {
        return false;
    }
    std::size_t stride = 1;
    bool contiguous = true;
    for (std::size_t i = extents.size(); i-- > 0;) {
        if (extents[i] == 0) {
            return true;
        }
        contiguous = contiguous && (extents[i] == 1 || strides[i] == stride);
        stride *= extents[i];
    }
    return contiguous;
}

namespace detail {

/// "(2, 3)": how error texts show extents and strides.
[[nodiscard]] inline std::string to_text(Shape const& shape) {
    std::string text = "(";
    for (std::size_t i = 0; i < shape.size(); ++i) {
        text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
    }
    return text + ")";
}

/// The size of the largest possible object, in bytes. Larger counts and steps are errors.
inline constexpr std::size_t max_bytes = (std::numeric_limits<std::size_t>::max)() / 2;

/// Throws ContractViolation for a number that was negative before conversion to std::size_t. It is
/// larger than any possible size of memory.
constexpr void check_not_negative(char const* what, std::size_t dimension, std::size_t value) {
    if (value > max_bytes) {
        throw ContractViolation{
            to_text(what) + " of dimension " + to_text(dimension) + " is -" +
            to_text(std::size_t{0} - value) +
            ", but must not be negative; start at the other end, or copy the tensor"
        };
    }
}

/// The number of elements of memory that a view spans: 1 + the largest offset. An empty view spans
/// 0, whatever its strides.
/// @throws ContractViolation  extents and strides differ in number, one of them is negative, or the
///                            view has more elements or spans more bytes than memory can have.
constexpr std::size_t
checked_reach(Shape const& extents, Shape const& strides, std::size_t element_bytes) {
    if (extents.size() != strides.size()) {
        throw ContractViolation{
            "a view needs one stride per extent, but got " + to_text(extents.size()) +
            " extents and " + to_text(strides.size()) + " strides"
        };
    }
    for (std::size_t d = 0; d < extents.size(); ++d) {
        check_not_negative("the extent", d, extents[d]);
    }
    std::size_t const count = numel(extents);
    if (count == 0) {
        return 0;
    }
    std::size_t reach = 1;
    std::size_t bytes = 0;
    bool overflow = count > max_bytes; // elements may share memory, but iterators count them
    for (std::size_t d = 0; d < extents.size(); ++d) {
        check_not_negative("the stride", d, strides[d]);
        std::size_t span = 0;
        overflow |= __builtin_mul_overflow(extents[d] - 1, strides[d], &span);
        overflow |= __builtin_add_overflow(reach, span, &reach);
    }
    overflow |= __builtin_mul_overflow(reach, element_bytes, &bytes);
    if (overflow || bytes > max_bytes) {
        throw ContractViolation{
            "a view of extents " + to_text(extents) + " and strides " + to_text(strides) +
            " reaches further than memory can; make extents or strides smaller"
        };
    }
    return reach;
}

/// @throws ContractViolation  the view spans more than these bytes.
constexpr void check_storage(
    Shape const& extents, Shape const& strides, std::size_t element_bytes, std::size_t storage_bytes
) {
    std::size_t const bytes = checked_reach(extents, strides, element_bytes) * element_bytes;
    if (bytes > storage_bytes) {
        throw ContractViolation{
            "a tensor of extents " + to_text(extents) + " and strides " + to_text(strides) +
            " spans " + to_text(bytes) + " bytes, but its memory has " + to_text(storage_bytes) +
            "; strides are in elements of " + to_text(element_bytes) + " bytes, not in bytes"
        };
    }
}

} // namespace detail

}} // namespace joinable::v0
