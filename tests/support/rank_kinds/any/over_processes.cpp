// SPDX-License-Identifier: BSL-1.0
#include "over_ranks.hpp"

#include <support/process_ranks.hpp>

namespace joinable_tests {

bool const ranks_share_memory = false;
bool const sums_in_rank_order = true;
bool const sums_have_one_order = true;
bool const compares_collectives = true;

/// A CHECK that fails in a rank fails here.
void over_ranks(std::initializer_list<int> sizes, FunctionRef<void(RankCommunicator&)> body) {
    run_process_ranks(sizes, [&](joinable::ProcessCommunicator& processes) {
        RankCommunicator comm{processes};
        body(comm);
    });
}

} // namespace joinable_tests
