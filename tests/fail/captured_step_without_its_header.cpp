// SPDX-License-Identifier: BSL-1.0
// EXPECT: CapturedStep: include <joinable/nccl_graphs.hpp>, and give an NcclCommunicator, gradients and passes, as in CapturedStep captured{comm, gradients, [&](auto ready) { model.passes(ready); }}
#include <joinable/join.hpp>

#include <vector>

int main() {
    joinable::SelfCommunicator comm;
    std::vector<joinable::Buffer> gradients;
    joinable::CapturedStep captured{comm, gradients, [](auto ready) { ready(0); }};
}
