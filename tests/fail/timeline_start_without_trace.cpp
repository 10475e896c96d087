// SPDX-License-Identifier: BSL-1.0
// EXPECT: start: this model records nothing; name a TraceTimeline in its type, as in DistributedDataParallel<Comm, AllReduce, TraceTimeline> ddp{...}
#include <joinable/join.hpp>

#include <vector>

struct Weights {
    std::vector<float> value, grad;
};

int main() {
    joinable::SelfCommunicator comm;
    std::vector<Weights> model(2);
    joinable::DistributedDataParallel ddp{comm, model};
    ddp.timeline().start(1000);
}
