// SPDX-License-Identifier: BSL-1.0
// EXPECT: Joinable: expected a member 'JoinState& join_state()'
#include <joinable/join.hpp>

#include <support/misuse.hpp>

struct NoState {
    joinable::SelfCommunicator comm;
    Hook join_hook(joinable::arguments<joinable::keywords<>> const&) { return {}; }
    joinable::SelfCommunicator& join_communicator() { return comm; }
};
int main() {
    NoState bad;
    joinable::Join guard{joinable::participants(bad)};
}
