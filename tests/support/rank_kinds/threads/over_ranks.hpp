// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <initializer_list>

#include <support/function_ref.hpp>
#include <support/ranks.hpp>

#include <joinable/communicator/shared_memory/thread.hpp>

/// @file
/// What tests of guards and participants run over. Each program that has them finds one header of this
/// name: here ranks are threads, in ../nccl they have an NCCL communicator each, and in ../any they are
/// what the program is linked with.

namespace joinable_tests {

using RankCommunicator = joinable::ThreadCommunicator;
/// Whether a body may write to variables of its test. Where ranks are processes, tests whose bodies do are
/// skipped: only what is Shared, and failed checks, come back from there.
inline constexpr bool ranks_share_memory = true;
/// Whether sums have the bits of a sum in rank order. Tests that compare them with such sums are skipped elsewhere.
inline constexpr bool sums_in_rank_order = true;
/// Whether all collectives sum in one order, so that the parts of a sum have the bits of the whole.
inline constexpr bool sums_have_one_order = true;
/// Whether integers can be combined bit by bit.
inline constexpr bool combines_bits = true;
/// Whether ranks compare what they are about to do in every collective.
inline constexpr bool compares_collectives = true;

/// Runs `body(comm)` over groups of these sizes, one after another; under a sanitizer over those that stand for
/// the others. What a body throws is rethrown.
inline void
over_ranks(std::initializer_list<int> sizes, FunctionRef<void(RankCommunicator&)> body) {
    run_participants(sizes, body);
}

} // namespace joinable_tests
