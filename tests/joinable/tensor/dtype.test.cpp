// SPDX-License-Identifier: BSL-1.0
#include <joinable/tensor/dtype.hpp>

#include <algorithm>
#include <cmath>
#include <complex>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#include <doctest/doctest.h>

namespace {

using joinable::BFloat16;
using joinable::DType;
using joinable::dtype_of;
using joinable::Element;
using joinable::Half;

static_assert(dtype_of<float> == DType::f32 && dtype_of<double> == DType::f64);
static_assert(dtype_of<long> == DType::i64 && dtype_of<long long> == DType::i64);
static_assert(dtype_of<unsigned char> == DType::u8 && dtype_of<char> == DType::i8);
static_assert(dtype_of<bool> == DType::boolean);
static_assert(dtype_of<short> == DType::i16 && dtype_of<unsigned short> == DType::u16);
static_assert(dtype_of<std::complex<float>> == DType::c64);
static_assert(dtype_of<std::complex<double>> == DType::c128);
static_assert(!Element<int*> && !Element<char32_t> && !Element<char16_t>);
static_assert(!Element<long double> && !Element<std::complex<long double>>);
static_assert(!Element<std::complex<int>> && !Element<std::pair<float, float>>);

/// Complex numbers of another library.
struct Pair {
    using value_type = float;
    float a, b;
    [[nodiscard]] float real() const { return a; }
    [[nodiscard]] float imag() const { return b; }
};
/// Larger than its parts, so not a pair in memory.
struct TaggedPair : Pair {
    int tag;
};
static_assert(dtype_of<Pair> == DType::c64 && !Element<TaggedPair>);

/// Each dtype has a name, a storage type and the predicates of that type.
constexpr bool test_every_dtype_is_known() {
    for (std::size_t i = 0; i < joinable::dtype_count; ++i) {
        auto const dtype = static_cast<DType>(i);
        bool const agrees = joinable::visit_dtype(dtype, [&]<class T>(std::type_identity<T>) {
            bool const is_half = std::same_as<T, Half> || std::same_as<T, BFloat16>;
            return dtype_of<T> == dtype && joinable::size_of(dtype) == sizeof(T) &&
                   joinable::is_half_precision(dtype) == is_half &&
                   joinable::is_floating_point(dtype) == (is_half || std::is_floating_point_v<T>);
        });
        if (!agrees || joinable::name_of(dtype).empty()) {
            return false;
        }
    }
    return true;
}
static_assert(test_every_dtype_is_known());
static_assert(joinable::name_of(static_cast<DType>(joinable::dtype_count - 1)) == "c128");

/// The number that bits stand for, by the definition of the format.
double number_of(unsigned bits, int exponent_bits, int mantissa_bits) {
    int const bias = (1 << (exponent_bits - 1)) - 1;
    int const exponent = static_cast<int>(bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
    int const mantissa = static_cast<int>(bits) & ((1 << mantissa_bits) - 1);
    double const sign = (bits >> (exponent_bits + mantissa_bits)) != 0 ? -1.0 : 1.0;
    if (exponent == (1 << exponent_bits) - 1) {
        return mantissa == 0 ? sign * std::numeric_limits<double>::infinity()
                             : std::numeric_limits<double>::quiet_NaN();
    }
    int const implicit = exponent == 0 ? 0 : 1 << mantissa_bits;
    return sign * std::ldexp(mantissa + implicit, std::max(exponent, 1) - bias - mantissa_bits);
}

template <class T>
void check_all_bits(int exponent_bits, int mantissa_bits) {
    int wrong = 0;
    for (unsigned bits = 0; bits < 65536; ++bits) {
        T value;
        value.bits = static_cast<std::uint16_t>(bits);
        double const expected = number_of(bits, exponent_bits, mantissa_bits);
        auto const number = static_cast<float>(value);
        if (std::isnan(expected)) {
            wrong += std::isnan(number) && std::isnan(static_cast<float>(T{number})) ? 0 : 1;
        } else {
            bool const same = number == static_cast<float>(expected) && T{number}.bits == bits;
            wrong += same ? 0 : 1;
        }
    }
    CHECK(wrong == 0);
}

TEST_CASE("every pattern of bits is the number of its definition, there and back") {
    check_all_bits<Half>(5, 10);
    check_all_bits<BFloat16>(8, 7);
}

/// Rounding is monotone, so it is right everywhere if it is right at every boundary: at the middle
/// between each two neighbours (which goes to the even one) and at the floats just beside it.
template <class T>
int wrong_roundings(int exponent_bits, int mantissa_bits) {
    auto const infinity = static_cast<unsigned>(((1 << exponent_bits) - 1) << mantissa_bits);
    int wrong = 0;
    for (unsigned low = 0; low < infinity; ++low) {
        double const below = number_of(low, exponent_bits, mantissa_bits);
        // What comes after the largest number is infinity, which rounding takes for 2^(max + 1).
        double const above = low + 1 < infinity ? number_of(low + 1, exponent_bits, mantissa_bits)
                                                : std::ldexp(1.0, 1 << (exponent_bits - 1));
        auto const middle = static_cast<float>((below + above) / 2);
        float const beyond = std::numeric_limits<float>::infinity();
        for (float const sign : {1.0F, -1.0F}) {
            unsigned const sign_bit = sign < 0 ? 0x8000U : 0U;
            unsigned const even = low + (low & 1U);
            wrong += T{sign * middle}.bits == (even | sign_bit) ? 0 : 1;
            wrong += T{sign * std::nextafter(middle, 0.0F)}.bits == (low | sign_bit) ? 0 : 1;
            wrong +=
                T{sign * std::nextafter(middle, beyond)}.bits == ((low + 1) | sign_bit) ? 0 : 1;
        }
    }
    return wrong;
}

TEST_CASE("conversion from float rounds to nearest, ties to even, at every boundary there is") {
    CHECK(wrong_roundings<Half>(5, 10) == 0);
    CHECK(wrong_roundings<BFloat16>(8, 7) == 0);
    CHECK(Half{65519.0F}.bits == 0x7bff); // the largest number, and just beyond it
    CHECK(Half{65520.0F}.bits == 0x7c00);
    CHECK(Half{0x1p-25F}.bits == 0);
    CHECK(Half{std::numeric_limits<float>::max()}.bits == 0x7c00);
    CHECK(BFloat16{std::numeric_limits<float>::max()}.bits == 0x7f80);
    CHECK(Half{-std::numeric_limits<float>::infinity()}.bits == 0xfc00);
}

TEST_CASE("sizes and names belong to their dtypes") {
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < joinable::dtype_count; ++i) {
        auto const dtype = static_cast<DType>(i);
        joinable::visit_dtype(dtype, [&]<class T>(std::type_identity<T>) {
            CHECK(dtype_of<T> == dtype);
            CHECK(sizeof(T) == joinable::size_of(dtype));
            bytes += sizeof(T);
        });
    }
    CHECK(bytes == 2 + 2 + 4 + 8 + 1 + 1 + 4 + 4 + 8 + 8 + 1 + 2 + 2 + 8 + 16);
    CHECK(joinable::name_of(DType::bf16) == "bf16");
}

} // namespace
