// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include <joinable/detail/hash.hpp>
#include <joinable/tensor/dtype.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// A sum over elements, so that ranks can add their shares. A change of one element always changes
/// the sum (splitmix64 is a bijection); swapping two elements almost certainly does.
template <std::size_t Bytes>
std::uint64_t hash_elements_of(std::byte const* data, std::uint64_t first, std::size_t count) {
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < count; ++i) {
        std::uint64_t x = 0;
        std::memcpy(&x, data + i * Bytes, Bytes);
        sum += splitmix(x + (first + i + 1) * splitmix_increment);
    }
    return sum;
}
/// Of `count` elements side by side, whose row-major numbers in their tensor begin with `first`.
inline std::uint64_t
hash_elements(std::byte const* data, std::uint64_t first, std::size_t count, DType dtype) {
    switch (size_of(dtype)) {
    case 16: return hash_elements_of<8>(data, 2 * first, 2 * count); // its two reals
    case 1: return hash_elements_of<1>(data, first, count);
    case 2: return hash_elements_of<2>(data, first, count);
    case 4: return hash_elements_of<4>(data, first, count);
    default: return hash_elements_of<8>(data, first, count);
    }
}

}}} // namespace joinable::v0::detail
