// SPDX-License-Identifier: BSL-1.0
// EXPECT: NcclCommunicator: the control communicator has to move memory of the host; use a
// EXPECT: ProcessCommunicator on one machine, a TcpCommunicator on several
#include <joinable/communicator/nccl/detail/control.hpp>
#include <joinable/communicator/self.hpp>

struct OnDevice : joinable::SelfCommunicator {
    using device_type = joinable::CudaDevice;
};
int main() {
    OnDevice comm;
    static_cast<void>(joinable::detail::nccl_control<OnDevice&>(comm));
}
