// SPDX-License-Identifier: BSL-1.0
// EXPECT: run_threads: the number of ranks comes first, as in run_threads(4,
// EXPECT: [](joinable::ThreadCommunicator& comm) { ... })
#include <joinable/join.hpp>

int main() {
    joinable::run_threads([](joinable::ThreadCommunicator& comm) { comm.barrier(); });
}
