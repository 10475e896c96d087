// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <joinable/config.hpp>
#include <joinable/reduction/arithmetic.hpp>
#include <joinable/reduction/rows.hpp>
#include <joinable/tensor/dtype.hpp>

/// @file
/// Converts rows of 16-bit numbers to float and back, with the same bits as Half and BFloat16.
/// Compiled for each instruction set. Rows do not overlap.

namespace joinable { inline namespace v0 { namespace detail {

template <sixteen_bits T>
struct Widen {
    static constexpr std::size_t from_bytes = sizeof(T);
    static constexpr std::size_t to_bytes = sizeof(float);
    static constexpr bool has_instruction = has_half_conversions && std::is_same_v<T, Half>;

    [[gnu::always_inline]] static void one(std::byte const* from, std::byte* to) noexcept {
        store<float>(to, Conversion<T>::widen(load<std::uint16_t>(from)));
    }
    JOINABLE_INLINE_AVX2 static void eight(std::byte const* from, std::byte* to) noexcept {
        EightFloats floats;
        widen(load<EightHalves>(from), floats);
        std::memcpy(to, &floats, sizeof(floats));
    }
};

template <sixteen_bits T>
struct Narrow {
    static constexpr std::size_t from_bytes = sizeof(float);
    static constexpr std::size_t to_bytes = sizeof(T);
    static constexpr bool has_instruction = has_half_conversions && std::is_same_v<T, Half>;

    [[gnu::always_inline]] static void one(std::byte const* from, std::byte* to) noexcept {
        store(to, static_cast<std::uint16_t>(Conversion<T>::narrow(load<float>(from))));
    }
    JOINABLE_INLINE_AVX2 static void eight(std::byte const* from, std::byte* to) noexcept {
        EightFloats floats;
        EightHalves halves;
        std::memcpy(&floats, from, sizeof(floats));
        narrow(floats, halves);
        store(to, halves);
    }
};

template <class C>
[[gnu::always_inline]] inline void convert_from(
    std::size_t done, std::byte const* __restrict from, std::byte* __restrict to, std::size_t count
) noexcept {
    for (std::size_t i = done; i < count; ++i) {
        C::one(from + i * C::from_bytes, to + i * C::to_bytes);
    }
}
/// Converts with the processor's instruction, if there is one. Returns the number of converted
/// elements.
template <class C>
JOINABLE_INLINE_AVX2 std::size_t
convert_eights(std::byte const* from, std::byte* to, std::size_t count) noexcept {
    std::size_t done = 0;
    if constexpr (C::has_instruction) {
        for (; done + 8 <= count; done += 8) {
            C::eight(from + done * C::from_bytes, to + done * C::to_bytes);
        }
    }
    return done;
}

template <class C>
JOINABLE_LOOP void
convert_baseline(std::byte const* from, std::byte* to, std::size_t count) noexcept {
    convert_from<C>(0, from, to, count);
}
template <class C>
JOINABLE_LOOP_AVX2 void
convert_avx2(std::byte const* from, std::byte* to, std::size_t count) noexcept {
    convert_from<C>(convert_eights<C>(from, to, count), from, to, count);
}

template <class C>
JOINABLE_LOOP_AVX512 void
convert_avx512(std::byte const* from, std::byte* to, std::size_t count) noexcept {
    convert_from<C>(convert_eights<C>(from, to, count), from, to, count);
}

/// The function that converts a row on this processor.
template <class C>
auto* conversion_function(InstructionSet set) noexcept {
    switch (set) {
    case InstructionSet::avx512: return &convert_avx512<C>;
    case InstructionSet::avx2: return &convert_avx2<C>;
    case InstructionSet::baseline: break;
    }
    return &convert_baseline<C>;
}

}}} // namespace joinable::v0::detail
