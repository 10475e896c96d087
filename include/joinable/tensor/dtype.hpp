// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

namespace joinable { inline namespace v0 {

/// The element types that communicators move and reduce.
enum class DType : std::uint8_t { f16, bf16, f32, f64, i8, u8, i32, u32, i64, u64 };

namespace detail {

inline constexpr std::string_view dtype_names[] = {
    "f16", "bf16", "f32", "f64", "i8", "u8", "i32", "u32", "i64", "u64"
};

} // namespace detail

/// The number of DTypes. Their values are [0, dtype_count).
inline constexpr std::size_t dtype_count = std::size(detail::dtype_names);

[[nodiscard]] constexpr bool is_floating_point(DType dtype) noexcept {
    switch (dtype) {
    case DType::f16:
    case DType::bf16:
    case DType::f32:
    case DType::f64: return true;
    case DType::i8:
    case DType::u8:
    case DType::i32:
    case DType::u32:
    case DType::i64:
    case DType::u64: break;
    }
    return false;
}
/// Whether elements have 16 bits (Half or BFloat16). Arithmetic on them uses float.
[[nodiscard]] constexpr bool is_half_precision(DType dtype) noexcept {
    return dtype == DType::f16 || dtype == DType::bf16;
}

/// IEEE 754 binary16 as storage. It has no arithmetic of its own: reductions convert to float.
/// Conversion from float rounds to nearest, ties to even.
struct Half {
    std::uint16_t bits = 0;

    Half() = default;
    explicit constexpr Half(float value) noexcept;
    explicit constexpr operator float() const noexcept;
    friend constexpr bool operator==(Half, Half) = default; ///< compares bits, not numbers
};

/// The upper half of a float (8 exponent bits, 7 mantissa bits) as storage, like `Half`.
struct BFloat16 {
    std::uint16_t bits = 0;

    BFloat16() = default;
    explicit constexpr BFloat16(float value) noexcept;
    explicit constexpr operator float() const noexcept;
    friend constexpr bool operator==(BFloat16, BFloat16) = default; ///< compares bits
};

namespace detail {

template <class T>
inline constexpr bool is_integer_of =
    std::integral<T> && !std::same_as<T, bool> && !std::same_as<T, wchar_t> &&
    !std::same_as<T, char8_t> && !std::same_as<T, char16_t> && !std::same_as<T, char32_t> &&
    (sizeof(T) == 1 || sizeof(T) == 4 || sizeof(T) == 8);

template <class T>
concept has_dtype = std::same_as<T, Half> || std::same_as<T, BFloat16> || std::same_as<T, float> ||
                    std::same_as<T, double> || is_integer_of<T>;

template <class T>
consteval DType find_dtype() {
    if constexpr (std::same_as<T, Half>) {
        return DType::f16;
    } else if constexpr (std::same_as<T, BFloat16>) {
        return DType::bf16;
    } else if constexpr (std::same_as<T, float>) {
        return DType::f32;
    } else if constexpr (std::same_as<T, double>) {
        return DType::f64;
    } else if constexpr (sizeof(T) == 1) {
        return std::is_signed_v<T> ? DType::i8 : DType::u8;
    } else if constexpr (sizeof(T) == 4) {
        return std::is_signed_v<T> ? DType::i32 : DType::u32;
    } else {
        return std::is_signed_v<T> ? DType::i64 : DType::u64;
    }
}

} // namespace detail

/// A type that has a `DType`. It is not const.
///
/// | expression    | result  | meaning                                                             |
/// |---------------|---------|---------------------------------------------------------------------|
/// | `dtype_of<T>` | `DType` | by kind and size: `long` and `long long` share one                  |
///
/// Models: float, double, Half, BFloat16, and the integers of 1, 4 and 8 bytes, except bool and
/// wide characters. Use unsigned char for masks that are communicated (buffers, broadcasts): a sum
/// of bools would not be a bool.
template <class T>
concept Element = detail::has_dtype<T>;

/// The `DType` of an element type.
template <Element T>
inline constexpr DType dtype_of = detail::find_dtype<T>();

/// The size of one element in bytes.
[[nodiscard]] constexpr std::size_t size_of(DType dtype) noexcept {
    switch (dtype) {
    case DType::i8:
    case DType::u8: return 1;
    case DType::f16:
    case DType::bf16: return 2;
    case DType::f32:
    case DType::i32:
    case DType::u32: return 4;
    case DType::f64:
    case DType::i64:
    case DType::u64: break;
    }
    return 8;
}

/// The enumerator's name.
[[nodiscard]] constexpr std::string_view name_of(DType dtype) noexcept {
    return detail::dtype_names[static_cast<std::size_t>(dtype)];
}

/// Calls `function(std::type_identity<T>{})` with the storage type of `dtype`. This is the only
/// place where a run-time dtype becomes a type.
template <class F>
constexpr decltype(auto) visit_dtype(DType dtype, F&& function) {
    switch (dtype) {
    case DType::f16: return function(std::type_identity<Half>{});
    case DType::bf16: return function(std::type_identity<BFloat16>{});
    case DType::f32: return function(std::type_identity<float>{});
    case DType::f64: return function(std::type_identity<double>{});
    case DType::i8: return function(std::type_identity<std::int8_t>{});
    case DType::u8: return function(std::type_identity<std::uint8_t>{});
    case DType::i32: return function(std::type_identity<std::int32_t>{});
    case DType::u32: return function(std::type_identity<std::uint32_t>{});
    case DType::i64: return function(std::type_identity<std::int64_t>{});
    case DType::u64: break;
    }
    return function(std::type_identity<std::uint64_t>{});
}

constexpr Half::Half(float value) noexcept {
    auto const word = std::bit_cast<std::uint32_t>(value);
    auto const sign = static_cast<std::uint16_t>((word >> 16) & 0x8000U);
    std::uint32_t const magnitude = word & 0x7fff'ffffU;
    if (magnitude > 0x7f80'0000U) { // NaN stays NaN, quiet
        bits = static_cast<std::uint16_t>(sign | 0x7e00U | ((magnitude >> 13) & 0x1ffU));
    } else if (magnitude >= 0x477f'f000U) { // rounds to infinity
        bits = static_cast<std::uint16_t>(sign | 0x7c00U);
    } else if (magnitude >= 0x3880'0000U) { // normal: rebias the exponent from 127 to 15
        std::uint32_t const rounded = magnitude - 0x3800'0000U + 0xfffU + ((magnitude >> 13) & 1U);
        bits = static_cast<std::uint16_t>(sign | (rounded >> 13));
    } else if (magnitude < 0x3300'0000U) { // below half of the smallest subnormal
        bits = sign;
    } else { // subnormal: shift the significand, round to nearest even
        std::uint32_t const shift = 126U - (magnitude >> 23);
        std::uint32_t const significand = (magnitude & 0x7f'ffffU) | 0x80'0000U;
        std::uint32_t const kept = significand >> shift;
        std::uint32_t const rest = significand & ((1U << shift) - 1U);
        std::uint32_t const half = 1U << (shift - 1U);
        bool const up = rest > half || (rest == half && (kept & 1U) != 0);
        bits = static_cast<std::uint16_t>(sign | (kept + (up ? 1U : 0U)));
    }
}

constexpr Half::operator float() const noexcept {
    std::uint32_t const sign = (static_cast<std::uint32_t>(bits) & 0x8000U) << 16;
    std::uint32_t const exponent = (bits >> 10) & 0x1fU;
    std::uint32_t const mantissa = bits & 0x3ffU;
    if (exponent == 0) { // zero or subnormal: mantissa times 2^-24
        float const magnitude = static_cast<float>(mantissa) * 0x1p-24F;
        return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
    }
    std::uint32_t const wide = exponent == 0x1fU ? 0xffU : exponent + 112U;
    return std::bit_cast<float>(sign | (wide << 23) | (mantissa << 13));
}

constexpr BFloat16::BFloat16(float value) noexcept {
    auto const word = std::bit_cast<std::uint32_t>(value);
    if ((word & 0x7fff'ffffU) > 0x7f80'0000U) { // NaN stays NaN, quiet
        bits = static_cast<std::uint16_t>((word >> 16) | 0x40U);
    } else {
        bits = static_cast<std::uint16_t>((word + 0x7fffU + ((word >> 16) & 1U)) >> 16);
    }
}

constexpr BFloat16::operator float() const noexcept {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

}} // namespace joinable::v0
