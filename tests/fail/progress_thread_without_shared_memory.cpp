// SPDX-License-Identifier: BSL-1.0
// EXPECT: ProgressThread: the communicator has to be a ThreadCommunicator or a ProcessCommunicator, in whose
// EXPECT: memory a thread can compute; over another transport call test() now and then
#include <joinable/communicator/self.hpp>
#include <joinable/communicator/shared_memory/progress_thread.hpp>

int main() {
    joinable::SelfCommunicator comm;
    joinable::ProgressThread const progress{comm};
}
