// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <joinable/config.hpp>
#include <joinable/reduction/arithmetic.hpp>

/// @file
/// Elements in registers, and what a reduction does to them. Registers are types of the compiler, and
/// always inlined: so the same text is compiled for each instruction set, by any optimisation level.

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
    /// The product is rounded, whatever it is added to: the same bits on every processor.
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

/// Registers that are computed together, half of those that a processor has: many loads are on their way
/// before something is written. Four take 1.2 times as long in the second-level cache, as do twelve.
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

// An operation on registers: `a`, of the lower ranks, becomes what it gives with `b`. `Number<T>` is a type
// that gives the same bits as T: the fewer there are, the less is to compile.

/// Integers are added and multiplied unsigned, because they wrap around: overflow of signed ones is
/// undefined, and the reduced value of a rank's data must not be.
template <class T>
struct without_sign {
    using type = T;
};
template <std::integral T>
struct without_sign<T> {
    using type = bits_of_size<sizeof(T)>;
};

struct Plus {
    template <class T>
    using Number = typename without_sign<T>::type;
    template <class Register>
    [[gnu::always_inline]] void operator()(Register& a, Register const& b) const noexcept {
        a = a + b;
    }
};
/// Adds what each rank has times a factor of its own. Of floating-point numbers alone.
struct PlusScaled : Plus {
    template <class T>
    using Number = std::conditional_t<std::floating_point<T>, T, float>;
};
struct Times {
    template <class T>
    using Number = typename without_sign<T>::type;
    template <class Register>
    [[gnu::always_inline]] void operator()(Register& a, Register const& b) const noexcept {
        a = a * b;
    }
};
/// A NaN of the lowest rank stays, one of another rank is left out, as by `std::min`.
struct Lesser {
    template <class T>
    using Number = T;
    template <class Register>
    [[gnu::always_inline]] void operator()(Register& a, Register const& b) const noexcept {
        a = b < a ? b : a;
    }
};
struct Greater {
    template <class T>
    using Number = T;
    template <class Register>
    [[gnu::always_inline]] void operator()(Register& a, Register const& b) const noexcept {
        a = a < b ? b : a;
    }
};
struct BitAnd {
    template <class>
    using Number = std::uint8_t;
    template <class Register>
    [[gnu::always_inline]] void operator()(Register& a, Register const& b) const noexcept {
        a = a & b;
    }
};
struct BitOr {
    template <class>
    using Number = std::uint8_t;
    template <class Register>
    [[gnu::always_inline]] void operator()(Register& a, Register const& b) const noexcept {
        a = a | b;
    }
};

}}} // namespace joinable::v0::detail
