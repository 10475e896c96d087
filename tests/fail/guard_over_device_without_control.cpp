// SPDX-License-Identifier: BSL-1.0
// EXPECT: Join: the communicator of the first participant in hook order reduces device memory
// EXPECT: only; add control(comm) after participants(...), with a host-side communicator
#include <joinable/join.hpp>

#include <support/misuse.hpp>

struct OnDevice : joinable::SelfCommunicator {
    using device_type = joinable::CudaDevice;
};
struct Participant {
    OnDevice comm;
    joinable::JoinState state;

    Hook join_hook(joinable::arguments<joinable::keywords<>> const&) { return {}; }
    OnDevice& join_communicator() { return comm; }
    joinable::JoinState& join_state() { return state; }
};
int main() {
    Participant alone;
    joinable::Join guard{joinable::participants(alone)};
}
