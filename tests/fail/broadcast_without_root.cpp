// SPDX-License-Identifier: BSL-1.0
// EXPECT: broadcast: say from which rank the buffer is copied, as in comm.broadcast(buffer, 0)
#include <joinable/join.hpp>

int main() {
    joinable::SelfCommunicator comm;
    float number = 0;
    comm.broadcast({&number, 1, joinable::DType::f32}).wait();
}
