// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include <joinable/bucket/compression/detail/numbers.hpp>
#include <joinable/config.hpp>

/// @file
/// Numbers as bytes: first the scale of each block, an f32, then an i8 for each number.

namespace joinable { inline namespace v0 { namespace detail {

inline constexpr std::size_t numbers_of_block = 256;

[[nodiscard]] constexpr std::size_t blocks_of(std::size_t count) noexcept {
    return (count + numbers_of_block - 1) / numbers_of_block;
}
[[nodiscard]] constexpr std::size_t bytes_of_blocks(std::size_t count) noexcept {
    return blocks_of(count) * sizeof(float) + count;
}

/// Writes numbers as bytes, and leaves of them what that loses. A block in which one is not finite becomes NaN.
template <class T>
JOINABLE_LOOP void write_blocks(T* numbers, std::size_t count, std::byte* to) noexcept {
    std::byte* bytes = to + blocks_of(count) * sizeof(float);
    for (std::size_t begin = 0; begin < count; begin += numbers_of_block) {
        T* const block = numbers + begin;
        std::size_t const size = (std::min)(numbers_of_block, count - begin);
        T most = 0;
        bool are_finite = true;
        for (std::size_t i = 0; i < size; ++i) {
            T const magnitude = block[i] < 0 ? -block[i] : block[i];
            most = magnitude > most ? magnitude : most;
            are_finite = is_finite(block[i]) && are_finite;
        }
        float const scale =
            are_finite ? static_cast<float>(most / 127) : std::numeric_limits<float>::quiet_NaN();
        std::memcpy(to, &scale, sizeof scale);
        to += sizeof scale;
        bool const is_zero = !(scale > 0); // or NaN
        T const divisor = is_zero ? T{1} : static_cast<T>(scale);
        for (std::size_t i = 0; i < size; ++i) {
            T const level = is_zero ? T{0} : block[i] / divisor;
            T const rounded =
                (std::min)((std::max)(level, T{-127}), T{127}) + (level < 0 ? T{-0.5} : T{0.5});
            auto const byte = static_cast<std::int8_t>(static_cast<std::int32_t>(rounded));
            std::memcpy(bytes + i, &byte, 1);
            block[i] -= static_cast<T>(byte) * static_cast<T>(scale);
        }
        bytes += size;
    }
}

/// Calls f(i, number) for each number.
template <class T, class F>
void read_blocks(std::byte const* from, std::size_t count, F const& f) {
    std::byte const* bytes = from + blocks_of(count) * sizeof(float);
    for (std::size_t begin = 0; begin < count; begin += numbers_of_block) {
        float scale;
        std::memcpy(&scale, from, sizeof scale);
        from += sizeof scale;
        std::size_t const end = (std::min)(begin + numbers_of_block, count);
        for (std::size_t i = begin; i < end; ++i) {
            std::int8_t byte;
            std::memcpy(&byte, bytes + i, 1);
            f(i, static_cast<T>(byte) * static_cast<T>(scale));
        }
    }
}

}}} // namespace joinable::v0::detail
