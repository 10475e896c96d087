// SPDX-License-Identifier: BSL-1.0
#include "over_ranks.hpp"

#include <vector>

#include <support/machines.hpp>

namespace joinable_tests {

// Ranks are threads, of machines of threads.
bool const ranks_share_memory = true;
bool const sums_in_rank_order = false;
bool const sums_have_one_order = true;
bool const compares_collectives = true;

/// The first machine has one rank, the second two, and so on; the last one has the rest.
void over_ranks(std::initializer_list<int> sizes, FunctionRef<void(RankCommunicator&)> body) {
    for (int left : sizes) {
        std::vector<int> machines;
        for (int next = 1; left > 0; left -= next++) {
            machines.push_back(left < next ? left : next);
        }
        run_machines(machines, [&](ThreadMachines& all) {
            RankCommunicator comm{all};
            body(comm);
        });
    }
}

} // namespace joinable_tests
