// SPDX-License-Identifier: BSL-1.0
// EXPECT: Checkpoint: this communicator moves the memory of a device, which no rank writes to a file; gather the state by consolidate(), and save state() and the values yourself
#include <joinable/checkpoint.hpp>

#include <support/device_archetype.hpp>

int main() {
    joinable::Checkpoint<joinable_tests::DeviceRanks, joinable::Adam>* checkpoint = nullptr;
    checkpoint->write();
}
