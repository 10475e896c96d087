// SPDX-License-Identifier: BSL-1.0
// EXPECT: Parameter: give the class members 'value' and 'grad' (public, of these names), or specialise
// EXPECT: joinable::parameter_traits for this very type
#include <joinable/join.hpp>

struct Weights {
    std::vector<float> data, gradient;
};
int main() {
    joinable::SelfCommunicator comm;
    std::vector<Weights> model(2);
    joinable::DistributedDataParallel ddp{comm, model};
}
