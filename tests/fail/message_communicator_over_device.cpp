// SPDX-License-Identifier: BSL-1.0
// EXPECT: ExchangesMessages: expected a communicator of host memory, where messages are combined
#include <joinable/join.hpp>

#include <joinable/algorithms.hpp>

struct OnDevice {
    using device_type = joinable::CudaDevice;
    int rank() const { return 0; }
    int size() const { return 1; }
    joinable::CompletedWork send(joinable::ConstBuffer, int, int) { return {}; }
    joinable::CompletedWork receive(joinable::Buffer, int, int) { return {}; }
};
int main() {
    OnDevice comm;
    joinable::MessageCommunicator over{comm};
}
