// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/staged_collectives.hpp>
#include <joinable/communicator/work.hpp>
#include <joinable/device/device.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/reduce_op.hpp>

namespace joinable_tests {

/// A communicator that moves the memory of some device: enough for what does not compile.
class DeviceRanks {
public:
    using device_type = joinable::Device;

    [[nodiscard]] int rank() const { return 0; }
    [[nodiscard]] int size() const { return 1; }
    joinable::CompletedWork all_reduce(joinable::Buffer, joinable::ReduceOp) { return {}; }
    joinable::CompletedWork broadcast(joinable::Buffer, int) { return {}; }
    void barrier() {}
    device_type& device_memory() { return *device_; }

private:
    joinable::Device* device_ = nullptr;
};

} // namespace joinable_tests
