// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace joinable { inline namespace v0 { namespace detail {

[[nodiscard]] constexpr std::size_t as_index(int rank) noexcept {
    return static_cast<std::size_t>(rank);
}

/// The ranks below `size` for which is_so(rank).
template <class IsSo>
[[nodiscard]] std::vector<int> ranks_where(int size, IsSo const& is_so) {
    std::vector<int> ranks;
    for (int rank = 0; rank < size; ++rank) {
        if (is_so(rank)) {
            ranks.push_back(rank);
        }
    }
    return ranks;
}

/// Whether is_so(rank) for a rank below `size`.
template <class IsSo>
[[nodiscard]] bool any_rank(int size, IsSo const& is_so) {
    int rank = 0;
    while (rank < size && !is_so(rank)) {
        ++rank;
    }
    return rank < size;
}

/// Both ranks in order, or the one if they are the same.
[[nodiscard]] inline std::vector<int> both_ranks(int one, int other) {
    auto const [least, most] = std::minmax(one, other);
    return least == most ? std::vector{least} : std::vector{least, most};
}

/// The arguments of split() on one rank.
struct GroupChoice {
    std::int32_t color;
    std::int32_t key;
};

/// The ranks of a group of split(), in its order, from the choices of all ranks.
[[nodiscard]] inline std::vector<int>
members_of(std::span<GroupChoice const> choices, std::int32_t color) {
    auto const choice = [&](int rank) { return choices[as_index(rank)]; };
    auto members = ranks_where(static_cast<int>(choices.size()), [&](int rank) {
        return choice(rank).color == color;
    });
    // Not std::stable_sort: clang 19 warns of what libstdc++ 12 calls in it.
    std::sort(members.begin(), members.end(), [&](int a, int b) {
        return std::pair{choice(a).key, a} < std::pair{choice(b).key, b};
    });
    return members;
}

}}} // namespace joinable::v0::detail
