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

/// A register for the bits of another one. Comparisons of that one have this type.
template <class Register>
using bits_of_register =
    decltype(std::declval<Register const&>() < std::declval<Register const&>());

/// Flips bits of each number.
template <class Register>
[[gnu::always_inline]] inline void flip_bits(Register& numbers, std::uint64_t flip) noexcept {
    using Bits = bits_of_register<Register>;
    using Word = std::remove_cvref_t<decltype(std::declval<Bits const&>()[0])>;
    Bits words;
    std::memcpy(&words, &numbers, sizeof(words));
    words ^= static_cast<Word>(flip);
    std::memcpy(&numbers, &words, sizeof(words));
}

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
    [[gnu::always_inline]] void flip(std::uint64_t bits) noexcept { flip_bits(numbers, bits); }
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
    [[gnu::always_inline]] void flip(std::uint64_t bits) noexcept {
        JOINABLE_UNROLL
        for (L& lane : lanes) {
            lane.flip(bits);
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
using without_sign =
    std::conditional_t<std::integral<T>, bits_of_size<std::integral<T> ? sizeof(T) : 1>, T>;

/// Integers are compared as baseline processors do it: bytes as unsigned, others as signed. Flipping
/// the sign makes one from the other.
template <class T>
using with_compared_sign = std::conditional_t<
    !std::integral<T>,
    T,
    std::conditional_t<
        sizeof(T) == 1,
        std::uint8_t,
        std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>>>;

struct Plus {
    static constexpr ReduceOp op = ReduceOp::sum;
    template <class T>
    using Number = without_sign<real_type<T>>;
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
    using Number = without_sign<T>;
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
/// An `and` is the `or` of flipped bits, flipped.
struct BitOr {
    static constexpr ReduceOp op = ReduceOp::bit_or;
    std::uint64_t flip; ///< what was flipped of each number and will be flipped back
    template <class>
    using Number = std::uint8_t;
    template <class Register>
    [[gnu::always_inline]] void operator()(Register& a, Register const& b) const noexcept {
        a = a | b;
    }
};

/// Whether a register has floating-point numbers.
template <class Register>
inline constexpr bool has_floats =
    std::floating_point<std::remove_cvref_t<decltype(std::declval<Register const&>()[0])>>;

/// The least number. The greatest is the least of flipped numbers, flipped: of all bits of integers,
/// of the sign of others. Among floating-point numbers a NaN wins, and -0 is less than 0; a result
/// that is NaN has the same bits whatever the NaNs have. The bits thus do not depend on the order of
/// ranks.
struct Lesser {
    static constexpr ReduceOp op = ReduceOp::min;
    template <class T>
    using Number = with_compared_sign<T>;
    std::uint64_t flip; ///< what was flipped of each number and will be flipped back

    template <class Register>
    [[gnu::always_inline]] void operator()(Register& a, Register const& b) const noexcept {
        if constexpr (has_floats<Register>) {
            // What a comparison chooses, in one order and in the other. They are the same unless
            // the numbers are 0 and -0, and the result is -0, or one is a NaN.
            using Bits = bits_of_register<Register>;
            using Word = std::remove_cvref_t<decltype(std::declval<Bits const&>()[0])>;
            using Float = std::remove_cvref_t<decltype(a[0])>;
            constexpr auto quiet = std::bit_cast<Word>(std::numeric_limits<Float>::quiet_NaN());
            Register const x = b < a ? b : a;
            Register const y = a < b ? a : b;
            Bits result;
            Bits other;
            std::memcpy(&result, &x, sizeof(x));
            std::memcpy(&other, &y, sizeof(y));
            result = x == y ? result | other : Bits{} | (quiet ^ static_cast<Word>(flip));
            std::memcpy(&a, &result, sizeof(a));
        } else {
            a = b < a ? b : a;
        }
    }
};

/// Whether an operation works on numbers of which bits were flipped.
template <class Operation>
concept flips_bits = requires(Operation operation) { operation.flip; };

/// The bits of each T to flip for an operation.
template <class T>
constexpr std::uint64_t flipped_bits(ReduceOp op) noexcept {
    constexpr std::uint64_t sign = std::uint64_t{1} << (8 * sizeof(T) - 1);
    std::uint64_t const all = op == ReduceOp::max || op == ReduceOp::bit_and ? ~std::uint64_t{} : 0;
    if constexpr (std::floating_point<T>) {
        return all & sign;
    }
    bool const compares = op == ReduceOp::min || op == ReduceOp::max;
    using Compared = Lesser::Number<T>;
    return all ^ (compares && std::signed_integral<T> != std::signed_integral<Compared> ? sign : 0);
}

}}} // namespace joinable::v0::detail
