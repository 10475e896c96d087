// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <functional>
#include <initializer_list>

#include <support/mpi_ranks.hpp>

/// @file
/// The suites of guards and participants over MPI: see ../threads/over_ranks.hpp. Every process of mpirun
/// runs them, and those that a group has no place for wait.

namespace joinable_tests {

using RankCommunicator = joinable::MpiCommunicator;
inline constexpr bool ranks_share_memory = false;
inline constexpr bool sums_in_rank_order = false;
inline constexpr bool combines_bits = true;
inline constexpr bool compares_collectives = false;

/// Runs `body(comm)` over groups of these sizes, one after another. What a body throws is PeerFailed.
inline void
over_ranks(std::initializer_list<int> sizes, std::function<void(RankCommunicator&)> const& body) {
    run_mpi_ranks(sizes, body);
}

} // namespace joinable_tests
