// SPDX-License-Identifier: BSL-1.0
#include "over_ranks.hpp"

#include <support/socket_ranks.hpp>
#include <support/volume.hpp>

#include <joinable/algorithms.hpp>

namespace joinable_tests {

// Ranks are threads, and their collectives are made of messages, in an order that depends on the size.
bool const ranks_share_memory = true;
bool const sums_in_rank_order = false;
bool const sums_have_one_order = false;
bool const compares_collectives = true;

void over_ranks(std::initializer_list<int> sizes, FunctionRef<void(RankCommunicator&)> body) {
    for (int const size : groups_up_to(4, sizes)) {
        run_socket_ranks({size}, [&](SocketCommunicator& sockets) {
            joinable::MessageCommunicator messages{sockets, {.check = true}};
            RankCommunicator comm{messages};
            body(comm);
        });
    }
}

} // namespace joinable_tests
