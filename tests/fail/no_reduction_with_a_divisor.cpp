// SPDX-License-Identifier: BSL-1.0
// EXPECT: no participant of this Join accepts the keyword (see check_keyword<...>)
#include <joinable/compression.hpp>
#include <joinable/join.hpp>

void f(joinable::DistributedDataParallel<joinable::ThreadCommunicator, joinable::NoReduction>& ddp
) {
    joinable::Join guard{
        joinable::participants(ddp), joinable::divide_by_initial_world_size = false
    };
}
int main() {}
