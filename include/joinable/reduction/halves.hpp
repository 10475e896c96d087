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

/// Converts a row. Uses the processor's instruction, if there is one.
template <class C>
struct ConvertLoop {
    [[gnu::always_inline]] static void
    run(std::size_t /*width*/,
        std::size_t done,
        std::byte const* __restrict from,
        std::byte* __restrict to,
        std::size_t count) noexcept {
        for (std::size_t i = done; i < count; ++i) {
            C::one(from + i * C::from_bytes, to + i * C::to_bytes);
        }
    }
    JOINABLE_INLINE_AVX2 static std::size_t
    convert(std::byte const* from, std::byte* to, std::size_t count) noexcept {
        std::size_t done = 0;
        if constexpr (C::has_instruction) {
            for (; done + 8 <= count; done += 8) {
                C::eight(from + done * C::from_bytes, to + done * C::to_bytes);
            }
        }
        return done;
    }
};
template <class C>
using ConvertLoops = CompiledLoop<ConvertLoop<C>, std::byte const*, std::byte*, std::size_t>;

}}} // namespace joinable::v0::detail
