// SPDX-License-Identifier: BSL-1.0
#pragma once

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

/// Whether elements of a dtype are combined by an operation: the table at ReduceOp.
[[nodiscard]] constexpr bool is_reducible(DType dtype, ReduceOp op) noexcept {
    bool const is_bitwise = op == ReduceOp::bit_and || op == ReduceOp::bit_or;
    bool const is_order = op == ReduceOp::min || op == ReduceOp::max;
    switch (row_of(dtype).kind) {
    case NumberKind::integer: return size_of(dtype) != 2;
    case NumberKind::boolean: return is_bitwise || is_order;
    case NumberKind::complex: return !is_bitwise && !is_order;
    default: return !is_bitwise;
    }
}

/// Whether a sum may multiply by factors, which are real.
[[nodiscard]] constexpr bool is_scalable(DType dtype) noexcept {
    return is_floating_point(real_of(dtype));
}

} // namespace detail

}} // namespace joinable::v0
