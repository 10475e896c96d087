// SPDX-License-Identifier: BSL-1.0
// EXPECT: Joinable: expected a member 'join_communicator()' that returns a Communicator by
// EXPECT: reference
#include <joinable/join.hpp>

#include <support/misuse.hpp>

struct NoCommunicator {
    joinable::JoinState state;
    Hook join_hook(joinable::arguments<joinable::keywords<>> const&) { return {}; }
    joinable::JoinState& join_state() { return state; }
};
int main() {
    NoCommunicator bad;
    joinable::Join guard{joinable::participants(bad)};
}
