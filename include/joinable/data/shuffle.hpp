// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <joinable/detail/hash.hpp>

namespace joinable { inline namespace v0 {

/// Selects the order of an epoch. The same two numbers give the same order on every rank, with
/// every compiler and standard library. Different pairs give different orders: epoch 1 of seed 7 is
/// not epoch 0 of seed 8.
struct Shuffle {
    std::uint64_t seed = 0;
    std::uint64_t epoch = 0; ///< count it up, or every epoch has the same order
};

namespace detail {

/// The upper half of the product.
[[nodiscard]] constexpr std::uint64_t multiply_high(std::uint64_t a, std::uint64_t b) noexcept {
    constexpr std::uint64_t low = 0xffff'ffff; // the standard has no 128-bit integer
    std::uint64_t const cross = (a >> 32) * (b & low) + ((a & low) * (b & low) >> 32);
    std::uint64_t const other = (a & low) * (b >> 32) + (cross & low);
    return (a >> 32) * (b >> 32) + (cross >> 32) + (other >> 32);
}

/// SplitMix64 of Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA
/// 2014), with the constants of Vigna's public domain code. Not for secrets.
class SplitMix64 {
public:
    explicit constexpr SplitMix64(std::uint64_t state) noexcept : state_{state} {}

    /// The generator of an epoch. Each epoch starts at its own state, which the generator of the
    /// seed draws. Any epoch can be reached directly, because states are counted up.
    explicit constexpr SplitMix64(Shuffle shuffle) noexcept : state_{0} {
        SplitMix64 states{SplitMix64{shuffle.seed}() + shuffle.epoch * splitmix_increment};
        state_ = states();
    }

    constexpr std::uint64_t operator()() noexcept {
        state_ += splitmix_increment;
        return splitmix(state_);
    }

    /// A number below `bound`, uniformly distributed. @pre bound is not 0.
    /// Lemire, "Fast random integer generation in an interval" (ACM TOMACS 29, 2019): mostly one
    /// multiplication and no division; draws again with a probability below bound / 2^64.
    constexpr std::uint64_t below(std::uint64_t bound) noexcept {
        std::uint64_t drawn = (*this)();
        if (drawn * bound < bound) {
            std::uint64_t const uneven = -bound % bound; // 2^64 mod bound
            while (drawn * bound < uneven) {
                drawn = (*this)();
            }
        }
        return multiply_high(drawn, bound);
    }

private:
    std::uint64_t state_;
};

} // namespace detail

/// The numbers from 0 to `count` - 1 in the order of an epoch. Local; the same on every rank.
///
/// Fisher and Yates's shuffle, from the last place to the first. Not std::shuffle, because its
/// result differs between standard libraries. Complexity: linear, one draw for each place but one.
[[nodiscard]] constexpr std::vector<std::size_t> permutation(std::size_t count, Shuffle shuffle) {
    std::vector<std::size_t> order(count);
    for (std::size_t i = 0; i < count; ++i) {
        order[i] = i;
    }
    detail::SplitMix64 random{shuffle};
    for (std::size_t left = count; left > 1; --left) {
        std::swap(order[left - 1], order[static_cast<std::size_t>(random.below(left))]);
    }
    return order;
}

}} // namespace joinable::v0
