// SPDX-License-Identifier: BSL-1.0
// EXPECT: HierarchicalCommunicator: expected the communicator of a machine's ranks, then a std::optional or a pointer
#include <joinable/join.hpp>

#include <joinable/hierarchical.hpp>

int main() {
    joinable::SelfCommunicator local;
    joinable::SelfCommunicator across;
    joinable::HierarchicalCommunicator comm{local, across};
}
