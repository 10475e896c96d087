// SPDX-License-Identifier: BSL-1.0
// EXPECT: PerDevice: expected communicators of CUDA devices, one for each; memory of the host needs only one
#include <joinable/per_device.hpp>

#include <joinable/communicator/self.hpp>

int main() {
    joinable::SelfCommunicator self;
    joinable::PerDevice comm{self};
}
