// SPDX-License-Identifier: BSL-1.0
// EXPECT: attach_collectives: give it the result of joinable::shadowed(comm), which has a name and lives as long as the model
#include <joinable/join.hpp>

#include <vector>

struct Weights {
    std::vector<float> value, grad;
};

int main() {
    joinable::SelfCommunicator comm;
    std::vector<Weights> model(2);
    joinable::DistributedDataParallel ddp{comm, model};
    ddp.attach_collectives(comm);
}
