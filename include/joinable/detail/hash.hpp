// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdint>
#include <string_view>

#include <joinable/config.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// FNV-1a with 64 bits, the same on every machine. Two inputs collide by accident once in 2^64;
/// collisions on purpose are easy.
class Hash {
public:
    constexpr Hash& add(std::string_view bytes) noexcept {
        for (char const byte : bytes) {
            add_byte(static_cast<unsigned char>(byte));
        }
        return *this;
    }
    constexpr Hash& add(std::uint64_t number) noexcept {
        for (int shift = 0; shift < 64; shift += 8) {
            add_byte((number >> shift) & 0xffU);
        }
        return *this;
    }
    [[nodiscard]] constexpr std::uint64_t value() const noexcept { return value_; }

private:
    constexpr void add_byte(std::uint64_t byte) noexcept {
        value_ = (value_ ^ byte) * 0x100'0000'01b3U;
    }

    std::uint64_t value_ = 0xcbf2'9ce4'8422'2325U;
};

/// The states of a SplitMix64 generator are apart by this: 2^64 / golden ratio, odd.
inline constexpr std::uint64_t splitmix_increment = 0x9e37'79b9'7f4a'7c15U;
/// The output of a state; a bijection. Source: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators",
/// 2014, with the constants of Vigna's public domain code.
[[nodiscard]] JOINABLE_HOST_DEVICE constexpr std::uint64_t splitmix(std::uint64_t state) noexcept {
    std::uint64_t bits = (state ^ (state >> 30U)) * 0xbf58'476d'1ce4'e5b9U;
    bits = (bits ^ (bits >> 27U)) * 0x94d0'49bb'1331'11ebU;
    return bits ^ (bits >> 31U);
}

}}} // namespace joinable::v0::detail
