// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable::inline v0::detail {

/// What each rank asks for, in bytes, by rank: all of them must ask for the same.
/// @throws Mismatch  on all ranks, which have the same sizes here.
inline void check_same_size(std::span<std::uint64_t const> sizes) {
    std::vector<int> ranks;
    std::string text =
        concat("ranks share memory of different sizes: rank 0 of ", sizes[0], " bytes");
    for (std::size_t rank = 1; rank < sizes.size(); ++rank) {
        if (sizes[rank] != sizes[0]) {
            ranks.push_back(static_cast<int>(rank));
            text += concat(", rank ", rank, " of ", sizes[rank]);
        }
    }
    if (!ranks.empty()) {
        throw Mismatch{ranks, text + "; give the same count of the same elements on every rank"};
    }
}

} // namespace joinable::inline v0::detail
