// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <joinable/reduction/arithmetic.hpp>
#include <joinable/reduction/halves.hpp>
#include <joinable/reduction/rows.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/dtype.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The type in which reductions compute with elements of a type: f64 for f64, else f32.
[[nodiscard]] constexpr DType number_dtype(DType dtype) noexcept {
    return dtype == DType::f64 ? DType::f64 : DType::f32;
}
[[nodiscard]] constexpr std::size_t number_size(DType dtype) noexcept {
    return size_of(number_dtype(dtype));
}
/// Calls f(T{}) with its type.
template <class F>
decltype(auto) visit_number(DType dtype, F const& f) {
    return number_dtype(dtype) == DType::f64 ? f(double{}) : f(float{});
}

/// Numbers times a factor, as numbers of another type. The memory may be the same if the types are.
template <class From, class To>
struct ScaleLoop {
    static std::size_t convert(std::byte const*, double, std::byte*, std::size_t) noexcept {
        return 0;
    }
    template <class Width>
    [[gnu::always_inline]] static void
    run(Width,
        std::size_t done,
        std::byte const* from,
        double factor,
        std::byte* to,
        std::size_t count) noexcept {
        using Number = std::common_type_t<From, To>;
        auto const scale = static_cast<Number>(factor);
        for (std::size_t i = done; i < count; ++i) {
            auto const number = static_cast<Number>(load<From>(from + i * sizeof(From)));
            store(to + i * sizeof(To), static_cast<To>(number * scale));
        }
    }
};
template <class From, class To>
using ScaleLoops =
    CompiledLoop<ScaleLoop<From, To>, std::byte const*, double, std::byte*, std::size_t>;

/// The same for elements: those of 16 bits become floats first, or last, so an f64 is rounded to float and then to 16 bits.
template <class From, class To>
void cast_elements(
    std::byte const* from, double factor, std::byte* to, std::size_t count
) noexcept {
    if constexpr (!sixteen_bits<From> && !sixteen_bits<To>) {
        ScaleLoops<From, To>::of()(from, factor, to, count);
    } else {
        constexpr std::size_t tile = 1024;
        std::array<std::byte, tile * sizeof(float)> floats;
        for (std::size_t done = 0; done < count; done += tile) {
            std::size_t const size = (std::min)(tile, count - done);
            std::byte const* numbers = from + done * sizeof(From);
            std::byte* const place = to + done * sizeof(To);
            if constexpr (sixteen_bits<From>) {
                ConvertLoops<Widen<From>>::of()(numbers, floats.data(), size);
                numbers = floats.data();
            }
            using Number = std::conditional_t<sixteen_bits<From>, float, From>;
            if constexpr (sixteen_bits<To>) {
                ScaleLoops<Number, float>::of()(numbers, factor, floats.data(), size);
                ConvertLoops<Narrow<To>>::of()(floats.data(), place, size);
            } else {
                ScaleLoops<Number, To>::of()(numbers, factor, place, size);
            }
        }
    }
}

/// Writes elements, times a factor, as elements of T: computed in f32, or in f64 if one of the types is that. The memory
/// may be the same if the types are.
template <class T>
void cast_to(Buffer from, double factor, T* to) {
    visit_floating(from.dtype, [&]<class From>(std::type_identity<From>) {
        cast_elements<From, T>(
            static_cast<std::byte const*>(from.data),
            factor,
            reinterpret_cast<std::byte*>(to),
            from.count
        );
    });
}
/// Writes numbers of T as elements of `to`.
template <class T>
void cast_from(T const* from, Buffer to) {
    visit_floating(to.dtype, [&]<class To>(std::type_identity<To>) {
        cast_elements<T, To>(
            reinterpret_cast<std::byte const*>(from),
            1.0,
            static_cast<std::byte*>(to.data),
            to.count
        );
    });
}

/// Whether a number is neither infinite nor NaN, by its bits: options such as -ffast-math do not change that.
template <class T>
[[nodiscard]] bool is_finite(T number) noexcept {
    using Bits = std::conditional_t<
        sizeof(T) == 8,
        std::uint64_t,
        std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint16_t>>;
    constexpr Bits exponent = sizeof(T) == 8          ? static_cast<Bits>(0x7ff0'0000'0000'0000U)
                              : sizeof(T) == 4        ? static_cast<Bits>(0x7f80'0000U)
                              : std::same_as<T, Half> ? Bits{0x7c00}
                                                      : Bits{0x7f80};
    Bits bits;
    std::memcpy(&bits, &number, sizeof(T));
    return (bits & exponent) != exponent;
}
[[nodiscard]] inline bool are_finite(Buffer buffer) {
    bool result = true;
    visit_floating(buffer.dtype, [&]<class T>(std::type_identity<T>) {
        auto const* const data = static_cast<std::byte const*>(buffer.data);
        for (std::size_t i = 0; i < buffer.count; ++i) {
            result = is_finite(load<T>(data + i * sizeof(T))) && result;
        }
    });
    return result;
}

}}} // namespace joinable::v0::detail
