// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <functional>
#include <initializer_list>
#include <vector>

#include <support/machines.hpp>

/// @file
/// The suites of guards and participants over machines of threads: see ../threads/over_ranks.hpp.

namespace joinable_tests {

using RankCommunicator = ThreadMachines;
inline constexpr bool ranks_share_memory = true;
inline constexpr bool sums_in_rank_order = false;
inline constexpr bool combines_bits = true;
inline constexpr bool compares_collectives = true;

/// Runs `body(comm)` over groups of these sizes, one after another. The first machine has one rank,
/// the second two, and so on; the last one has the rest.
inline void
over_ranks(std::initializer_list<int> sizes, std::function<void(RankCommunicator&)> const& body) {
    for (int left : sizes) {
        std::vector<int> machines;
        for (int next = 1; left > 0; left -= next++) {
            machines.push_back(left < next ? left : next);
        }
        run_machines(machines, body);
    }
}

} // namespace joinable_tests
