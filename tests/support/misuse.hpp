// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/join.hpp>

// What the files in fail/ have in common: a correct participant, of which each of them breaks one
// thing, and a communicator that is none.

struct Hook {
    void main_hook() {}
    void post_hook(bool) {}
};

struct Good {
    joinable::SelfCommunicator comm;
    joinable::JoinState state;

    Hook join_hook(joinable::arguments<joinable::keywords<>> const&) { return {}; }
    joinable::SelfCommunicator& join_communicator() { return comm; }
    joinable::JoinState& join_state() { return state; }
};

struct Deaf { // without all_reduce
    int rank() const { return 0; }
    int size() const { return 1; }
    joinable::CompletedWork broadcast(joinable::Buffer, int) { return {}; }
    void barrier() {}
};
