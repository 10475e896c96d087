// SPDX-License-Identifier: BSL-1.0
// EXPECT: HierarchicalCommunicator: expected communicators of host memory for both levels
#include <joinable/join.hpp>

#include <joinable/hierarchical.hpp>

struct OnDevice {
    using device_type = joinable::CudaDevice;
    int rank() const { return 0; }
    int size() const { return 1; }
    joinable::CompletedWork all_reduce(joinable::Buffer, joinable::ReduceOp) { return {}; }
    joinable::CompletedWork broadcast(joinable::Buffer, int) { return {}; }
    void barrier() {}
};
int main() {
    OnDevice local;
    joinable::SelfCommunicator across;
    joinable::HierarchicalCommunicator comm{local, &across};
}
