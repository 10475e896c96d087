// SPDX-License-Identifier: BSL-1.0
#include "over_ranks.hpp"

#include <support/gloo_ranks.hpp>
#include <support/volume.hpp>

#include <joinable/gloo.hpp>

namespace joinable_tests {

// Ranks are threads. All pairs of them connect in each group, so suites have groups of 4 at most: more ranks are a
// matter of tests of the communicator itself.
bool const ranks_share_memory = true;
bool const sums_in_rank_order = true;
bool const sums_have_one_order = true;
bool const compares_collectives = true;

void over_ranks(std::initializer_list<int> sizes, FunctionRef<void(RankCommunicator&)> body) {
    for (int const size : groups_up_to(4, sizes)) {
        run_gloo_ranks({size}, [&](joinable::GlooCommunicator& gloo) {
            RankCommunicator comm{gloo};
            body(comm);
        });
    }
}

} // namespace joinable_tests
