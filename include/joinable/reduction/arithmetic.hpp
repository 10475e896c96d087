// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <joinable/tensor/dtype.hpp>

namespace joinable { inline namespace v0 { namespace detail {

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
