// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string_view>

#include <joinable/tensor/dtype.hpp>

namespace joinable { inline namespace v0 {

/// How a reduction combines two elements. The operations of each kind of elements:
///
/// | elements                                     | operations                                     |
/// |----------------------------------------------|------------------------------------------------|
/// | floating-point numbers                       | sum, product, min, max                         |
/// | integers of 8, 32 and 64 bits                | all; sums and products wrap around             |
/// | booleans                                     | min and bit_and (and), max and bit_or (or)     |
/// | complex numbers                              | sum, product                                   |
/// | i16, u16                                     | none: convert them to i32                      |
///
/// Others are refused by a ContractViolation before data moves. NCCL has no bitwise operations and no
/// product of complex numbers. The min and max of floating-point numbers are NaN if a number is NaN,
/// and -0 is less than 0, so the bits do not depend on the order of ranks. NCCL differs: it ignores a
/// NaN unless all numbers are NaN, and either zero may result. A product of complex numbers is
/// (ac - bd) + (ad + bc)i, each product and sum rounded.
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

namespace detail {

/// The operations that combine elements of each dtype, as bits: the table at ReduceOp.
inline constexpr auto reductions_of = [] {
    constexpr auto bits = [](auto... ops) {
        return static_cast<std::uint8_t>(((1U << static_cast<unsigned>(ops)) | ...));
    };
    std::array<std::uint8_t, dtype_count> all{};
    for (std::size_t i = 0; i < dtype_count; ++i) {
        using enum ReduceOp;
        switch (dtype_table[i].kind) {
        case NumberKind::integer:
            all[i] = dtype_table[i].size != 2 ? bits(sum, product, min, max, bit_and, bit_or) : 0;
            break;
        case NumberKind::boolean: all[i] = bits(min, max, bit_and, bit_or); break;
        case NumberKind::complex: all[i] = bits(sum, product); break;
        default: all[i] = bits(sum, product, min, max);
        }
    }
    return all;
}();

/// Whether elements of a dtype are combined by an operation.
[[nodiscard]] constexpr bool is_reducible(DType dtype, ReduceOp op) noexcept {
    return (reductions_of[static_cast<std::size_t>(dtype)] >> static_cast<unsigned>(op) & 1U) != 0;
}

/// Whether a sum may multiply by factors, which are real.
[[nodiscard]] constexpr bool is_scalable(DType dtype) noexcept {
    return is_floating_point(dtype) || is_complex(dtype);
}

} // namespace detail

}} // namespace joinable::v0
