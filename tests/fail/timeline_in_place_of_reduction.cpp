// SPDX-License-Identifier: BSL-1.0
// EXPECT: DistributedDataParallel: a timeline is the third template argument, as in DistributedDataParallel<Comm, AllReduce, TraceTimeline>
#include <joinable/join.hpp>
#include <joinable/trace.hpp>

#include <vector>

struct Weights {
    std::vector<float> value, grad;
};

int main() {
    joinable::SelfCommunicator comm;
    std::vector<Weights> model(2);
    joinable::DistributedDataParallel<joinable::SelfCommunicator, joinable::TraceTimeline> ddp{
        comm, model
    };
}
