// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <bit>
#include <concepts>
#include <cstdint>
#include <type_traits>

#include <joinable/tensor/dtype.hpp>

namespace joinable { inline namespace v0 { namespace detail {

// The functions below are written for vectorisers: they have no branches and compare only signed
// numbers (SSE2 has no other comparison). They are always inlined, so that they are compiled for
// their caller's instruction set.

/// `yes` if the condition holds, else `no`, without a branch into which a compiler could move work.
[[gnu::always_inline]] constexpr std::uint32_t
select(bool condition, std::uint32_t yes, std::uint32_t no) noexcept {
    std::uint32_t const mask = 0U - static_cast<std::uint32_t>(condition);
    return (yes & mask) | (no & ~mask);
}

/// Converts between float and a 16-bit format in the low half of a word. The bits are the same as
/// those of BFloat16 and Half.
template <class T>
struct Conversion;

template <>
struct Conversion<BFloat16> {
    [[gnu::always_inline]] static constexpr float widen(std::uint32_t bits) noexcept {
        return std::bit_cast<float>(bits << 16);
    }
    [[gnu::always_inline]] static constexpr std::uint32_t narrow(float value) noexcept {
        auto const word = std::bit_cast<std::uint32_t>(value);
        bool const is_nan = static_cast<std::int32_t>(word & 0x7fff'ffffU) > 0x7f80'0000;
        std::uint32_t const rounded = word + 0x7fffU + ((word >> 16) & 1U);
        return (is_nan ? word | 0x40'0000U : rounded) >> 16;
    }
};

template <>
struct Conversion<Half> {
    [[gnu::always_inline]] static constexpr float widen(std::uint32_t bits) noexcept {
        auto const magnitude = static_cast<std::int32_t>(bits & 0x7fffU);
        std::uint32_t const shifted = static_cast<std::uint32_t>(magnitude) << 13;
        // Zero and subnormals: the mantissa times 2^-24, exactly.
        auto const subnormal =
            std::bit_cast<std::uint32_t>(static_cast<float>(magnitude) * 0x1p-24F);
        // Others: the exponent is rebiased from 15 to 127; that of infinity and NaN becomes 255.
        std::uint32_t const other =
            shifted + 0x3800'0000U + select(magnitude > 0x7bff, 0x3800'0000U, 0U);
        return std::bit_cast<float>(
            ((bits & 0x8000U) << 16) | select(magnitude < 0x400, subnormal, other)
        );
    }
    [[gnu::always_inline]] static constexpr std::uint32_t narrow(float value) noexcept {
        auto const word = std::bit_cast<std::uint32_t>(value);
        auto const magnitude = static_cast<std::int32_t>(word & 0x7fff'ffffU);
        auto const bits = static_cast<std::uint32_t>(magnitude);
        // Below 2^-14: adding 0.5, whose last place is 2^-24, rounds to a subnormal.
        std::uint32_t const subnormal =
            std::bit_cast<std::uint32_t>(std::bit_cast<float>(bits) + 0.5F) - 0x3f00'0000U;
        std::uint32_t const normal = (bits - 0x3800'0000U + 0xfffU + ((bits >> 13) & 1U)) >> 13;
        std::uint32_t const nan = 0x7e00U | ((bits >> 13) & 0x1ffU);
        std::uint32_t result = select(magnitude < 0x3880'0000, subnormal, normal);
        result = select(magnitude >= 0x477f'f000, 0x7c00U, result); // rounds to infinity
        result = select(magnitude > 0x7f80'0000, nan, result);
        return ((word >> 16) & 0x8000U) | result;
    }
};

template <class T>
concept sixteen_bits = std::same_as<T, Half> || std::same_as<T, BFloat16>;

/// The unsigned integer of a size. Integers are added in it, because it wraps.
template <std::size_t Bytes>
    requires(Bytes == 1 || Bytes == 2 || Bytes == 4 || Bytes == 8)
using bits_of_size = std::conditional_t<
    Bytes <= 2,
    std::conditional_t<Bytes == 1, std::uint8_t, std::uint16_t>,
    std::conditional_t<Bytes == 4, std::uint32_t, std::uint64_t>>;

/// Applies an operation to the halves of two words, and returns a word of the two results.
template <class T, class Operation>
[[gnu::always_inline]] inline std::uint32_t
each_half(Operation const& operation, std::uint32_t source, std::uint32_t target) noexcept {
    using C = Conversion<T>;
    float low = C::widen(target & 0xffffU);
    float high = C::widen(target >> 16);
    operation.compute(C::widen(source & 0xffffU), low);
    operation.compute(C::widen(source >> 16), high);
    return C::narrow(low) | (C::narrow(high) << 16);
}

// An operation on elements. `Element` is the type in memory. `Word` is the type of one computation:
// one element, or two of 16 bits (a single one is then in the low half). The call takes a word of
// the source and the word of the target that it replaces. `compute` does the same to widened 16-bit
// numbers, to one or to a register full.

/// target = source * factor
template <class T>
struct Scale {
    using Element = T;
    using Word = T;
    T factor;

    explicit Scale(double number) noexcept : factor{static_cast<T>(number)} {}
    [[gnu::always_inline]] T operator()(T source, T) const noexcept { return source * factor; }
};

template <sixteen_bits T>
struct Scale<T> {
    using Element = std::uint16_t;
    using Word = std::uint32_t;
    using Number = T;
    float factor;

    explicit Scale(double number) noexcept : factor{static_cast<float>(number)} {}
    template <class Floats>
    [[gnu::always_inline]] void compute(Floats const& source, Floats& target) const noexcept {
        target = source * factor;
    }
    [[gnu::always_inline]] Word operator()(Word source, Word) const noexcept {
        return each_half<T>(*this, source, 0);
    }
};

/// target = target + source
template <class T>
struct Add {
    using Element = T;
    using Word = T;

    [[gnu::always_inline]] T operator()(T source, T target) const noexcept {
        return static_cast<T>(target + source);
    }
};

template <sixteen_bits T>
struct Add<T> {
    using Element = std::uint16_t;
    using Word = std::uint32_t;
    using Number = T;

    template <class Floats>
    [[gnu::always_inline]] void compute(Floats const& source, Floats& target) const noexcept {
        target = target + source;
    }
    [[gnu::always_inline]] Word operator()(Word source, Word target) const noexcept {
        return each_half<T>(*this, source, target);
    }
};

/// target = source; only the bits matter.
template <class Bits>
struct Assign {
    using Element = Bits;
    using Word = Bits;

    [[gnu::always_inline]] Bits operator()(Bits source, Bits) const noexcept { return source; }
};

}}} // namespace joinable::v0::detail
