// SPDX-License-Identifier: BSL-1.0
// EXPECT: shared_buffer: this communicator has no member 'Arena share(std::size_t bytes)'
#include <joinable/join.hpp>

struct FarAway {
    int rank() const { return 0; }
    int size() const { return 1; }
    joinable::CompletedWork all_reduce(joinable::Buffer, joinable::ReduceOp) { return {}; }
    joinable::CompletedWork broadcast(joinable::Buffer, int) { return {}; }
    void barrier() {}
};

void share(FarAway& comm) {
    auto const weights = joinable::shared_buffer<float>(comm, 8);
}
