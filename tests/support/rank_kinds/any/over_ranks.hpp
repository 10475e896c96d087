// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <initializer_list>

#include <support/function_ref.hpp>

#include <joinable/any_communicator.hpp>

/// @file
/// The suites of guards and participants over what the program is linked with, compiled once for all of
/// these: see ../threads/over_ranks.hpp. Each of them defines over_ranks() and what is told of its ranks.

namespace joinable_tests {

using RankCommunicator = joinable::AnyCommunicator;
extern bool const ranks_share_memory;
extern bool const sums_in_rank_order;
extern bool const sums_have_one_order;
inline constexpr bool combines_bits = true;
extern bool const compares_collectives;

/// Runs `body(comm)` over groups of these sizes, one after another. What a body throws is rethrown.
void over_ranks(std::initializer_list<int> sizes, FunctionRef<void(RankCommunicator&)> body);

} // namespace joinable_tests
