// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include <joinable/config.hpp>
#include <joinable/reduction/arithmetic.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/reduce_op.hpp>

/// @file
/// Elements in registers, and the operations of a reduction on them. Registers are compiler vector
/// types, and the functions are always inlined. The same source thus compiles for each instruction
/// set, at any optimisation level.

namespace joinable { inline namespace v0 { namespace detail {

/// A register of elements.
template <class T, std::size_t width>
struct Lanes {
    using Register [[gnu::vector_size(width)]] = T;
    static constexpr std::size_t bytes = width;
    Register numbers;

    [[gnu::always_inline]] void load(std::byte const* from) noexcept {
        std::memcpy(&numbers, from, width);
    }
    [[gnu::always_inline]] void store(std::byte* to) const noexcept {
        std::memcpy(to, &numbers, width);
    }
    template <class Operation>
    [[gnu::always_inline]] void combine(Operation const& operation, Lanes const& next) noexcept {
        operation(numbers, next.numbers);
    }
    /// Rounds the product before it is added, so that all processors give the same bits.
    [[gnu::always_inline]] void scale(T factor) noexcept {
        if constexpr (width == sizeof(T)) {
            T product;
            JOINABLE_ROUNDED_PRODUCT(product, numbers[0], factor);
            numbers[0] = product;
        } else {
            JOINABLE_ROUNDED_PRODUCT(numbers, numbers, factor);
        }
    }
};

/// One complex number. Only products need its parts together, so this is not vectorised.
template <class Real, std::size_t width>
struct Lanes<Complex<Real>, width> {
    static constexpr std::size_t bytes = sizeof(Complex<Real>);
    Complex<Real> number;

    [[gnu::always_inline]] void load(std::byte const* from) noexcept {
        std::memcpy(&number, from, bytes);
    }
    [[gnu::always_inline]] void store(std::byte* to) const noexcept {
        std::memcpy(to, &number, bytes);
    }
    template <class Operation>
    [[gnu::always_inline]] void combine(Operation const& operation, Lanes const& next) noexcept {
        operation(number, next.number);
    }
};

/// Registers that are computed together. They are half of a processor's registers, so that many
/// loads are in flight before something is written. Four take 1.2 times as long in the second-level
/// cache, as do twelve.
template <class L>
struct EightLanes {
    static constexpr std::size_t number = 8;
    static constexpr std::size_t bytes = number * L::bytes;
    L lanes[number];

    [[gnu::always_inline]] void load(std::byte const* from) noexcept {
        JOINABLE_UNROLL
        for (std::size_t i = 0; i < number; ++i) {
            lanes[i].load(from + i * L::bytes);
        }
    }
    [[gnu::always_inline]] void store(std::byte* to) const noexcept {
        JOINABLE_UNROLL
        for (std::size_t i = 0; i < number; ++i) {
            lanes[i].store(to + i * L::bytes);
        }
    }
    template <class Operation>
    [[gnu::always_inline]] void
    combine(Operation const& operation, EightLanes const& next) noexcept {
        JOINABLE_UNROLL
        for (std::size_t i = 0; i < number; ++i) {
            lanes[i].combine(operation, next.lanes[i]);
        }
    }
    template <class T>
    [[gnu::always_inline]] void scale(T factor) noexcept {
        JOINABLE_UNROLL
        for (L& lane : lanes) {
            lane.scale(factor);
        }
    }
};

// An operation on registers: `a`, of the lower ranks, becomes the result of `a` and `b`.
// `Number<T>` is a type that gives the same bits as T. Fewer types mean less to compile.

/// Complex numbers are added part by part.
template <class T>
struct parts_of {
    using type = T;
};
template <class Real>
struct parts_of<Complex<Real>> {
    using type = Real;
};
template <class T>
using real_type = typename parts_of<T>::type;

/// Integers are added and multiplied as unsigned, because these wrap around. Signed overflow is
/// undefined, and reducing any rank's data must be defined.
template <class T>
struct without_sign {
    using type = T;
};
template <std::integral T>
struct without_sign<T> {
    using type = bits_of_size<sizeof(T)>;
};

struct Plus {
    static constexpr ReduceOp op = ReduceOp::sum;
    template <class T>
    using Number = typename without_sign<real_type<T>>::type;
    template <class Register>
    [[gnu::always_inline]] void operator()(Register& a, Register const& b) const noexcept {
        a = a + b;
    }
};
/// Adds each rank's value times that rank's factor. Floating-point numbers only.
struct PlusScaled : Plus {
    template <class T>
    using Number = std::conditional_t<std::floating_point<real_type<T>>, real_type<T>, float>;
};
struct Times {
    static constexpr ReduceOp op = ReduceOp::product;
    template <class T>
    using Number = typename without_sign<T>::type;
    template <class Register>
    [[gnu::always_inline]] void operator()(Register& a, Register const& b) const noexcept {
        a = a * b;
    }
    template <class Real>
    [[gnu::always_inline]] void
    operator()(Complex<Real>& a, Complex<Real> const& b) const noexcept {
        Real ac;
        Real bd;
        Real ad;
        Real bc;
        JOINABLE_ROUNDED_PRODUCT(ac, a.parts[0], b.parts[0]);
        JOINABLE_ROUNDED_PRODUCT(bd, a.parts[1], b.parts[1]);
        JOINABLE_ROUNDED_PRODUCT(ad, a.parts[0], b.parts[1]);
        JOINABLE_ROUNDED_PRODUCT(bc, a.parts[1], b.parts[0]);
        a = {{ac - bd, ad + bc}};
    }
};
struct BitAnd {
    static constexpr ReduceOp op = ReduceOp::bit_and;
    template <class>
    using Number = std::uint8_t;
    template <class Register>
    [[gnu::always_inline]] void operator()(Register& a, Register const& b) const noexcept {
        a = a & b;
    }
};
struct BitOr {
    static constexpr ReduceOp op = ReduceOp::bit_or;
    template <class>
    using Number = std::uint8_t;
    template <class Register>
    [[gnu::always_inline]] void operator()(Register& a, Register const& b) const noexcept {
        a = a | b;
    }
};

/// A register for the bits of another one. Comparisons of that one have this type.
template <class Register>
using bits_of_register =
    decltype(std::declval<Register const&>() < std::declval<Register const&>());

/// Whether a register has floating-point numbers.
template <class Register>
inline constexpr bool has_floats =
    std::floating_point<std::remove_cvref_t<decltype(std::declval<Register const&>()[0])>>;

/// `x` becomes the result of two numbers. `x` and `y` are what a comparison of them chooses, in one
/// order and in the other. They are the same, unless the numbers are 0 and -0, which an operation on
/// bits decides, or a number is a NaN. A result that is NaN has the same bits whatever the NaNs have.
template <class Register, class Operation>
[[gnu::always_inline]] inline void
resolve_floats(Register& x, Register const& y, Operation const& decide) noexcept {
    using Bits = bits_of_register<Register>;
    using Number = std::remove_cvref_t<decltype(x[0])>;
    using Word = std::remove_cvref_t<decltype(std::declval<Bits const&>()[0])>;
    constexpr auto quiet = std::bit_cast<Word>(std::numeric_limits<Number>::quiet_NaN());
    Bits result;
    Bits other;
    std::memcpy(&result, &x, sizeof(x));
    std::memcpy(&other, &y, sizeof(y));
    decide(result, other);
    result = x == y ? result : Bits{} | quiet;
    std::memcpy(&x, &result, sizeof(x));
}

/// Among floating-point numbers a NaN wins, and -0 is less than 0. The bits thus do not depend on
/// the order of ranks.
struct Lesser {
    static constexpr ReduceOp op = ReduceOp::min;
    template <class T>
    using Number = std::conditional_t<std::same_as<T, bool>, std::uint8_t, T>;
    template <class Register>
    [[gnu::always_inline]] void operator()(Register& a, Register const& b) const noexcept {
        if constexpr (has_floats<Register>) {
            Register const other = a < b ? a : b;
            a = b < a ? b : a;
            resolve_floats(a, other, BitOr{}); // of 0 and -0 it is -0
        } else {
            a = b < a ? b : a;
        }
    }
};
struct Greater {
    static constexpr ReduceOp op = ReduceOp::max;
    template <class T>
    using Number = std::conditional_t<std::same_as<T, bool>, std::uint8_t, T>;
    template <class Register>
    [[gnu::always_inline]] void operator()(Register& a, Register const& b) const noexcept {
        if constexpr (has_floats<Register>) {
            Register const other = b < a ? a : b;
            a = a < b ? b : a;
            resolve_floats(a, other, BitAnd{}); // of 0 and -0 it is 0
        } else {
            a = a < b ? b : a;
        }
    }
};

}}} // namespace joinable::v0::detail
