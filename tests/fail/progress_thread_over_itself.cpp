// SPDX-License-Identifier: BSL-1.0
// EXPECT: ProgressThread: the communicator has to be a ThreadCommunicator, a ProcessCommunicator or an
// EXPECT: MpiCommunicator, whose collectives another thread can complete; over others call test() now and then
#include <joinable/communicator/progress_thread.hpp>
#include <joinable/communicator/self.hpp>

int main() {
    joinable::SelfCommunicator comm;
    joinable::ProgressThread const progress{comm};
}
