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
inline constexpr std::size_t dtype_sizes[] = {2, 2, 4, 8, 1, 1, 4, 4, 8, 8};

} // namespace detail

/// The number of DTypes. Their values are [0, dtype_count).
inline constexpr std::size_t dtype_count = std::size(detail::dtype_names);

[[nodiscard]] constexpr bool is_floating_point(DType dtype) noexcept {
    return dtype <= DType::f64; // these come first
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
concept has_dtype =
    std::same_as<T, Half> || std::same_as<T, BFloat16> || std::same_as<T, float> ||
    std::same_as<T, double> ||
    (std::integral<T> && !std::same_as<T, bool> && !std::same_as<T, wchar_t> &&
     !std::same_as<T, char8_t> && !std::same_as<T, char16_t> && !std::same_as<T, char32_t> &&
     (sizeof(T) == 1 || sizeof(T) == 4 || sizeof(T) == 8));

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
    return detail::dtype_sizes[static_cast<std::size_t>(dtype)];
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

namespace detail {

/// Calls f with the floating-point dtype as a type.
template <class F>
void visit_floating(DType dtype, F const& f) {
    switch (dtype) {
    case DType::f16: return f(std::type_identity<Half>{});
    case DType::bf16: return f(std::type_identity<BFloat16>{});
    case DType::f64: return f(std::type_identity<double>{});
    default: return f(std::type_identity<float>{});
    }
}

// Reductions convert by the functions below, so these are written for vectorisers: they have no
// branches and compare only signed numbers (SSE2 has no other comparison). They are always inlined,
// so that they are compiled for their caller's instruction set.

/// `yes` if the condition holds, else `no`, without a branch into which a compiler could move work.
[[gnu::always_inline]] constexpr std::uint32_t
select(bool condition, std::uint32_t yes, std::uint32_t no) noexcept {
    std::uint32_t const mask = 0U - static_cast<std::uint32_t>(condition);
    return (yes & mask) | (no & ~mask);
}

/// Converts between float and a 16-bit format in the low half of a word.
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
        // Below 2^-14: adding 0.5, whose last place is 2^-24, rounds to a subnormal. No constant
        // expression adds to a NaN.
        float const number = std::is_constant_evaluated() && magnitude > 0x7f80'0000
                                 ? 0.0F
                                 : std::bit_cast<float>(bits);
        std::uint32_t const subnormal = std::bit_cast<std::uint32_t>(number + 0.5F) - 0x3f00'0000U;
        std::uint32_t const normal = (bits - 0x3800'0000U + 0xfffU + ((bits >> 13) & 1U)) >> 13;
        std::uint32_t const nan = 0x7e00U | ((bits >> 13) & 0x1ffU);
        std::uint32_t result = select(magnitude < 0x3880'0000, subnormal, normal);
        result = select(magnitude >= 0x477f'f000, 0x7c00U, result); // rounds to infinity
        result = select(magnitude > 0x7f80'0000, nan, result);
        return ((word >> 16) & 0x8000U) | result;
    }
};

} // namespace detail

constexpr Half::Half(float value) noexcept
    : bits{static_cast<std::uint16_t>(detail::Conversion<Half>::narrow(value))} {}
constexpr Half::operator float() const noexcept {
    return detail::Conversion<Half>::widen(bits);
}
constexpr BFloat16::BFloat16(float value) noexcept
    : bits{static_cast<std::uint16_t>(detail::Conversion<BFloat16>::narrow(value))} {}
constexpr BFloat16::operator float() const noexcept {
    return detail::Conversion<BFloat16>::widen(bits);
}

}} // namespace joinable::v0
