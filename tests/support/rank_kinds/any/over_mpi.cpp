// SPDX-License-Identifier: BSL-1.0
#include "over_ranks.hpp"

#include <support/mpi_ranks.hpp>

namespace joinable_tests {

// Every process of mpirun runs the tests, and those that a group has no place for wait.
bool const ranks_share_memory = false;
bool const sums_in_rank_order = false;
bool const sums_have_one_order = false;
bool const compares_collectives = false;

/// What a body throws is PeerFailed.
void over_ranks(std::initializer_list<int> sizes, FunctionRef<void(RankCommunicator&)> body) {
    run_mpi_ranks(sizes, [&](joinable::MpiCommunicator& mpi) {
        RankCommunicator comm{mpi};
        body(comm);
    });
}

} // namespace joinable_tests
