// SPDX-License-Identifier: BSL-1.0
// EXPECT: run_processes: each rank calls body(ProcessCommunicator&), which this body does not take
#include <joinable/join.hpp>

#include <support/misuse.hpp>

int main() {
    joinable::run_processes(2, [](joinable::ThreadCommunicator&) {});
}
