// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string_view>
#include <type_traits>

namespace joinable { inline namespace v0 {

/// The element types that communicators move. All are broadcast, gathered and stored; ReduceOp says
/// which are reduced. A boolean is one byte, 0 or 1. c64 and c128 are two f32 or two f64: the real
/// part, then the imaginary one.
enum class DType : std::uint8_t {
    f16,
    bf16,
    f32,
    f64,
    i8,
    u8,
    i32,
    u32,
    i64,
    u64,
    boolean,
    i16,
    u16,
    c64,
    c128
};

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

/// The storage type of complex numbers.
template <std::floating_point Real>
struct Complex {
    using value_type = Real;
    Real parts[2];

    [[nodiscard]] constexpr Real real() const noexcept { return parts[0]; }
    [[nodiscard]] constexpr Real imag() const noexcept { return parts[1]; }
};

/// A complex number of two floats or doubles side by side, such as std::complex, whose header is
/// large and not needed.
template <class T>
concept complex_number =
    std::is_class_v<T> &&
    requires(T const& number) {
        typename T::value_type;
        { number.real() } -> std::same_as<typename T::value_type>;
        { number.imag() } -> std::same_as<typename T::value_type>;
    } &&
    (std::same_as<typename T::value_type, float> || std::same_as<typename T::value_type, double>) &&
    sizeof(T) == 2 * sizeof(typename T::value_type) && std::is_trivially_copyable_v<T>;

template <class T>
concept floating_number = std::same_as<T, Half> || std::same_as<T, BFloat16> ||
                          std::same_as<T, float> || std::same_as<T, double>;
template <class T>
concept integer_number = std::integral<T> && !std::same_as<T, bool> && !std::same_as<T, wchar_t> &&
                         !std::same_as<T, char8_t> && !std::same_as<T, char16_t> &&
                         !std::same_as<T, char32_t> && sizeof(T) <= 8;

template <class T>
concept has_dtype =
    floating_number<T> || integer_number<T> || std::same_as<T, bool> || complex_number<T>;

enum class NumberKind : std::uint8_t { half, bfloat, floating_point, integer, boolean, complex };

template <has_dtype T>
inline constexpr NumberKind kind_of = std::same_as<T, Half>       ? NumberKind::half
                                      : std::same_as<T, BFloat16> ? NumberKind::bfloat
                                      : std::floating_point<T>    ? NumberKind::floating_point
                                      : std::same_as<T, bool>     ? NumberKind::boolean
                                      : std::integral<T>          ? NumberKind::integer
                                                                  : NumberKind::complex;

/// A row of the table of DTypes.
struct DTypeRow {
    std::string_view name;
    std::string_view stored; ///< in files; that of the parts of a complex one
    std::size_t size;        ///< in bytes
    NumberKind kind;
    bool is_signed; ///< of an integer
    DType real;     ///< that of the parts of a complex one, else itself
};

/// The one list of all DTypes, in the order of their values. visit_dtype() has their types.
inline constexpr DTypeRow dtype_table[] = {
    {"f16", "F16", 2, NumberKind::half, false, DType::f16},
    {"bf16", "BF16", 2, NumberKind::bfloat, false, DType::bf16},
    {"f32", "F32", 4, NumberKind::floating_point, false, DType::f32},
    {"f64", "F64", 8, NumberKind::floating_point, false, DType::f64},
    {"i8", "I8", 1, NumberKind::integer, true, DType::i8},
    {"u8", "U8", 1, NumberKind::integer, false, DType::u8},
    {"i32", "I32", 4, NumberKind::integer, true, DType::i32},
    {"u32", "U32", 4, NumberKind::integer, false, DType::u32},
    {"i64", "I64", 8, NumberKind::integer, true, DType::i64},
    {"u64", "U64", 8, NumberKind::integer, false, DType::u64},
    {"boolean", "BOOL", 1, NumberKind::boolean, false, DType::boolean},
    {"i16", "I16", 2, NumberKind::integer, true, DType::i16},
    {"u16", "U16", 2, NumberKind::integer, false, DType::u16},
    {"c64", "F32", 8, NumberKind::complex, false, DType::f32},
    {"c128", "F64", 16, NumberKind::complex, false, DType::f64},
};

[[nodiscard]] constexpr DTypeRow const& row_of(DType dtype) noexcept {
    return dtype_table[static_cast<std::size_t>(dtype)];
}

template <class T>
consteval DType find_dtype() {
    bool const is_signed = std::integral<T> && std::is_signed_v<T>;
    std::size_t i = 0;
    while (dtype_table[i].kind != kind_of<T> || dtype_table[i].size != sizeof(T) ||
           dtype_table[i].is_signed != is_signed) {
        ++i;
    }
    return static_cast<DType>(i);
}

} // namespace detail

/// The number of DTypes. Their values are [0, dtype_count).
inline constexpr std::size_t dtype_count = std::size(detail::dtype_table);

namespace detail {

/// The sizes of the table, closer together.
inline constexpr auto dtype_sizes = [] {
    std::array<std::uint8_t, dtype_count> sizes{};
    for (std::size_t i = 0; i < dtype_count; ++i) {
        sizes[i] = static_cast<std::uint8_t>(dtype_table[i].size);
    }
    return sizes;
}();

} // namespace detail

[[nodiscard]] constexpr bool is_floating_point(DType dtype) noexcept {
    return dtype <= DType::f64; // these come first
}

/// Whether elements have 16 bits (Half or BFloat16). Arithmetic on them uses float.
[[nodiscard]] constexpr bool is_half_precision(DType dtype) noexcept {
    return dtype == DType::f16 || dtype == DType::bf16;
}

namespace detail {

[[nodiscard]] constexpr bool is_complex(DType dtype) noexcept {
    return dtype >= DType::c64; // these come last
}

/// The dtype of the parts of complex numbers; `dtype` if it is not complex.
[[nodiscard]] constexpr DType real_of(DType dtype) noexcept {
    return row_of(dtype).real;
}

/// The number of elements of real_of(dtype) in one of `dtype`: 2 if it is complex, else 1.
[[nodiscard]] constexpr std::size_t reals_in(DType dtype) noexcept {
    return is_complex(dtype) ? 2 : 1;
}

/// The complex dtype whose parts are `real`, f32 or f64.
[[nodiscard]] constexpr DType complex_of(DType real) noexcept {
    return real == DType::f64 ? DType::c128 : DType::c64;
}

} // namespace detail

/// A type that has a `DType`. It is not const.
///
/// | expression    | result  | meaning                                                             |
/// |---------------|---------|---------------------------------------------------------------------|
/// | `dtype_of<T>` | `DType` | by kind and size: `long` and `long long` share one                  |
///
/// Models: float, double, Half, BFloat16, bool, the integers of 1, 2, 4 and 8 bytes except wide
/// characters, and complex numbers of float or double (std::complex, and others whose members
/// `real()` and `imag()` return the two parts that they consist of).
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
    return detail::row_of(dtype).name;
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
    case DType::boolean: return function(std::type_identity<bool>{});
    case DType::i16: return function(std::type_identity<std::int16_t>{});
    case DType::u16: return function(std::type_identity<std::uint16_t>{});
    case DType::c64: return function(std::type_identity<detail::Complex<float>>{});
    case DType::c128: return function(std::type_identity<detail::Complex<double>>{});
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
