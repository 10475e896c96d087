// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace joinable { inline namespace v0 {

/// How a reduction combines two elements. Sums and products of integers wrap around; the bit
/// operations are for integers only.
enum class ReduceOp : std::uint8_t { sum, product, min, max, bit_and, bit_or };

/// The enumerator's name, for error texts.
[[nodiscard]] constexpr std::string_view name_of(ReduceOp op) noexcept {
    constexpr std::string_view names[] = {"sum", "product", "min", "max", "bit_and", "bit_or"};
    return names[static_cast<std::size_t>(op)];
}

}} // namespace joinable::v0
