// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <functional>
#include <initializer_list>

#include <support/gloo_ranks.hpp>

#include <joinable/gloo.hpp>

/// @file
/// The suites of guards and participants over Gloo: see ../threads/over_ranks.hpp. Ranks are threads.

namespace joinable_tests {

using RankCommunicator = joinable::GlooCommunicator;
inline constexpr bool ranks_share_memory = true;
inline constexpr bool sums_in_rank_order = true;
inline constexpr bool combines_bits = true;
inline constexpr bool compares_collectives = true;

/// Runs `body(comm)` over groups of these sizes, one after another. What a body throws is rethrown.
inline void
over_ranks(std::initializer_list<int> sizes, std::function<void(RankCommunicator&)> const& body) {
    run_gloo_ranks(sizes, body);
}

} // namespace joinable_tests
