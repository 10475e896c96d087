// SPDX-License-Identifier: BSL-1.0
#include <joinable/tensor/dtype.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <type_traits>

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
static_assert(!Element<bool> && !Element<short> && !Element<int*> && !Element<char32_t>);

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

/// Rounding to nearest, ties to even, by looking at both neighbours.
template <class T>
void check_rounding(float value) {
    T const rounded{value};
    auto const distance = [&](std::uint16_t bits) {
        T neighbour;
        neighbour.bits = bits;
        return std::abs(static_cast<double>(static_cast<float>(neighbour)) - value);
    };
    std::uint16_t const bits = rounded.bits;
    if (!std::isfinite(static_cast<float>(rounded))) {
        return;
    }
    double const error = distance(bits);
    for (int const step : {-1, 1}) {
        auto const other = static_cast<std::uint16_t>(bits + step);
        if ((other & 0x7fffU) == 0x7fffU || (bits & 0x7fffU) == 0 ||
            !std::isfinite(distance(other))) {
            continue;
        }
        REQUIRE(error <= distance(other));
        if (error == distance(other)) {
            REQUIRE((bits & 1U) == 0);
        }
    }
}

TEST_CASE("conversion from float rounds to nearest, ties to even") {
    std::mt19937 random{7};
    for (int i = 0; i < 200'000; ++i) {
        auto const any = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
        if (std::isfinite(any)) {
            check_rounding<BFloat16>(any);
        }
        float const near_half = std::ldexp(
            static_cast<float>(random() % 100'000) / 65'536.0F, static_cast<int>(random() % 40) - 25
        );
        check_rounding<Half>(near_half);
    }
    CHECK(Half{65519.0F}.bits == 0x7bff); // the largest number, and just beyond it
    CHECK(Half{65520.0F}.bits == 0x7c00);
    CHECK(Half{0x1p-25F}.bits == 0);
}

TEST_CASE("sizes and names belong to their dtypes") {
    std::size_t bytes = 0;
    for (int i = 0; i < 10; ++i) {
        auto const dtype = static_cast<DType>(i);
        joinable::visit_dtype(dtype, [&]<class T>(std::type_identity<T>) {
            CHECK(dtype_of<T> == dtype);
            CHECK(sizeof(T) == joinable::size_of(dtype));
            bytes += sizeof(T);
        });
    }
    CHECK(bytes == 2 + 2 + 4 + 8 + 1 + 1 + 4 + 4 + 8 + 8);
    CHECK(joinable::name_of(DType::bf16) == "bf16");
}

} // namespace
