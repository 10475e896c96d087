// SPDX-License-Identifier: BSL-1.0
// EXPECT: which a leader learns why ranks failed; use communicators that model TellsReason
#include <joinable/join.hpp>

#include <joinable/hierarchical.hpp>

struct Silent {
    int rank() const { return 0; }
    int size() const { return 1; }
    joinable::CompletedWork all_reduce(joinable::Buffer, joinable::ReduceOp) { return {}; }
    joinable::CompletedWork broadcast(joinable::Buffer, int) { return {}; }
    void barrier() {}
    void abort(joinable::AbortReason) {}
    bool is_aborted() const { return false; }
};
int main() {
    Silent local;
    joinable::SelfCommunicator across;
    joinable::HierarchicalCommunicator comm{local, &across};
}
