// SPDX-License-Identifier: BSL-1.0
// EXPECT: trace: expected a TraceTimeline, as ddp.timeline() of DistributedDataParallel<Comm, AllReduce, TraceTimeline> is one
#include <joinable/join.hpp>
#include <joinable/trace.hpp>

#include <vector>

struct Weights {
    std::vector<float> value, grad;
};

int main() {
    joinable::SelfCommunicator comm;
    std::vector<Weights> model(2);
    joinable::DistributedDataParallel ddp{comm, model};
    joinable::write_picture(comm, ddp.timeline(), "run.svg");
}
