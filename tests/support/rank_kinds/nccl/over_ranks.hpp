// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <initializer_list>

#include <support/function_ref.hpp>
#include <support/host_nccl.hpp>
#include <support/nccl_ranks.hpp>
#include <support/volume.hpp>

/// @file
/// The suites of guards and participants over NCCL: see ../threads/over_ranks.hpp.

namespace joinable_tests {

using RankCommunicator = HostNccl;
inline constexpr bool ranks_share_memory = true;
inline constexpr bool sums_in_rank_order = true;
inline constexpr bool sums_have_one_order = true;
inline constexpr bool combines_bits = false;
inline constexpr bool compares_collectives = false;

/// Runs `body(comm)` over groups of these sizes, one after another; under a sanitizer over those that stand for
/// the others. What a body throws is rethrown.
inline void
over_ranks(std::initializer_list<int> sizes, FunctionRef<void(RankCommunicator&)> body) {
    for (int const size : groups_of_participants(sizes)) {
        run_nccl_ranks({size}, [&](auto& nccl, auto& hosts, cudaStream_t) {
            HostNccl comm{nccl, hosts};
            body(comm);
        });
    }
}

} // namespace joinable_tests
