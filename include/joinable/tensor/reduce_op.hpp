// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string_view>

namespace joinable { inline namespace v0 {

/// How a reduction combines two elements. Sums and products of integers wrap around. Bitwise
/// operations are for integers only. The min and max of floating-point numbers are NaN if a number is
/// NaN, and -0 is less than 0, so the bits do not depend on the order of ranks. NCCL differs: it
/// ignores a NaN unless all numbers are NaN, and either zero may result.
enum class ReduceOp : std::uint8_t { sum, product, min, max, bit_and, bit_or };

namespace detail {

inline constexpr std::string_view reduce_op_names[] = {
    "sum", "product", "min", "max", "bit_and", "bit_or"
};

} // namespace detail

/// The number of ReduceOps. Their values are [0, reduce_op_count).
inline constexpr std::size_t reduce_op_count = std::size(detail::reduce_op_names);

/// The enumerator's name.
[[nodiscard]] constexpr std::string_view name_of(ReduceOp op) noexcept {
    return detail::reduce_op_names[static_cast<std::size_t>(op)];
}

}} // namespace joinable::v0
