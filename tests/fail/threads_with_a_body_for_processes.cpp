// SPDX-License-Identifier: BSL-1.0
// EXPECT: run_threads: each rank calls body(ThreadCommunicator&), which this body does not take
#include <joinable/join.hpp>

#include <support/misuse.hpp>

int main() {
    joinable::run_threads(2, [](joinable::ProcessCommunicator&) {});
}
