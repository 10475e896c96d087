// SPDX-License-Identifier: BSL-1.0
// EXPECT(g++): designator order for field
// EXPECT(clang++): ISO C++ requires field designators to be specified in declaration order
// EXPECT(nvcc): out-of-order initializers are nonstandard
#include <joinable/join.hpp>

#include <support/misuse.hpp>

struct Weights {
    std::vector<float> value, grad;
};
int main() {
    joinable::SelfCommunicator comm;
    std::vector<Weights> model(2);
    joinable::DistributedDataParallel ddp{
        comm, model, {.find_unused = true, .bucket_cap_bytes = 1024}
    };
}
