// SPDX-License-Identifier: BSL-1.0
// EXPECT: sharded optimizer: PerDevice has several devices, but shards are dealt out on one; make an optimizer of the
#include <joinable/per_device.hpp>
#include <joinable/zero.hpp>

#include <vector>

struct OnDevice : joinable::SelfCommunicator {
    using device_type = joinable::SeveralDevices;
    joinable::SeveralDevices& device_memory();
};

int main() {
    OnDevice self;
    joinable::PerDevice comm{self};
    std::vector<std::vector<float>> none;
    joinable::ZeroRedundancyOptimizer<joinable::PerDevice<OnDevice>, joinable::Sgd>* zero = nullptr;
    zero->step();
}
