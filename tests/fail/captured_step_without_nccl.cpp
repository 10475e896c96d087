// SPDX-License-Identifier: BSL-1.0
// EXPECT: CapturedStep: the communicator has to be an NcclCommunicator or an NcclCommunicatorRef,
// EXPECT: whose collectives a CUDA graph can hold; over another one use DistributedDataParallel
#include <joinable/communicator/self.hpp>
#include <joinable/participant/captured/captured_step.hpp>

int main() {
    static_cast<void>(joinable::detail::models_captured_step<joinable::SelfCommunicator>());
}
