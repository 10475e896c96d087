// SPDX-License-Identifier: BSL-1.0
#include "over_ranks.hpp"

#include <support/gloo_ranks.hpp>

#include <joinable/gloo.hpp>

namespace joinable_tests {

// Ranks are threads.
bool const ranks_share_memory = true;
bool const sums_in_rank_order = true;
bool const sums_have_one_order = true;
bool const compares_collectives = true;

void over_ranks(
    std::initializer_list<int> sizes, std::function<void(RankCommunicator&)> const& body
) {
    run_gloo_ranks(sizes, [&](joinable::GlooCommunicator& gloo) {
        RankCommunicator comm{gloo};
        body(comm);
    });
}

} // namespace joinable_tests
