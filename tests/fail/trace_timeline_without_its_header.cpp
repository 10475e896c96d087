// SPDX-License-Identifier: BSL-1.0
// EXPECT: Timeline: this class is only declared; include <joinable/trace.hpp> for TraceTimeline, <joinable/nvtx.hpp> for NvtxTimeline
#include <joinable/join.hpp>

#include <vector>

struct Weights {
    std::vector<float> value, grad;
};
int main() {
    using namespace joinable;
    SelfCommunicator comm;
    std::vector<Weights> model(2);
    DistributedDataParallel<SelfCommunicator, AllReduce, TraceTimeline> ddp{comm, model};
}
