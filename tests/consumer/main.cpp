// SPDX-License-Identifier: BSL-1.0
#include <joinable/join.hpp>

#include <vector>

int main() {
    int wrong = 0;
    joinable::run_threads(2, [&](joinable::ThreadCommunicator& comm) {
        std::vector<float> values(3, 1.0F);
        comm.all_reduce(joinable::to_buffer(values), joinable::ReduceOp::sum).wait();
        if (values[2] != 2.0F) {
            ++wrong;
        }
    });
    return wrong;
}
