// SPDX-License-Identifier: BSL-1.0
// EXPECT: run_processes: the number of ranks comes first, as in run_processes(4,
// EXPECT: [](joinable::ProcessCommunicator& comm) { ... })
#include <joinable/join.hpp>

int main() {
    joinable::run_processes([](joinable::ProcessCommunicator& comm) { comm.barrier(); });
}
