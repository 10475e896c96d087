// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <functional>
#include <initializer_list>

#include <support/process_ranks.hpp>

#include <joinable/communicator/shared_memory/process.hpp>

/// @file
/// The suites of guards and participants over processes: see ../threads/over_ranks.hpp.

namespace joinable_tests {

using RankCommunicator = joinable::ProcessCommunicator;
inline constexpr bool ranks_share_memory = false;
inline constexpr bool sums_in_rank_order = true;
inline constexpr bool sums_have_one_order = true;
inline constexpr bool combines_bits = true;
inline constexpr bool compares_collectives = true;

/// Runs `body(comm)` over groups of these sizes, one after another. A CHECK that fails in one of them
/// fails here.
inline void
over_ranks(std::initializer_list<int> sizes, std::function<void(RankCommunicator&)> const& body) {
    run_process_ranks(sizes, body);
}

} // namespace joinable_tests
