// SPDX-License-Identifier: BSL-1.0
#include "over_ranks.hpp"

#include <support/ranks.hpp>

namespace joinable_tests {

bool const ranks_share_memory = true;
bool const sums_in_rank_order = true;
bool const sums_have_one_order = true;
bool const compares_collectives = true;

void over_ranks(std::initializer_list<int> sizes, FunctionRef<void(RankCommunicator&)> body) {
    run_participants(sizes, [&](joinable::ThreadCommunicator& threads) {
        RankCommunicator comm{threads};
        body(comm);
    });
}

} // namespace joinable_tests
