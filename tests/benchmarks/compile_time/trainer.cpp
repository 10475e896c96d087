// SPDX-License-Identifier: BSL-1.0
// A trainer in one file, as an engine would write it: what compile_time.py measures.
#include <cstdio>
#include <vector>

#include <joinable/join.hpp>

struct Parameter {
    std::vector<float> value;
    std::vector<float> grad;
};

int main() {
    std::vector<float> const inputs{1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
    joinable::run_threads(4, [&](joinable::ThreadCommunicator& comm) {
        std::vector<Parameter> model{{{0.5F}, {0.0F}}};
        joinable::DistributedDataParallel ddp{comm, model};
        joinable::Step step{comm, [&] { model[0].value[0] -= 0.01F * model[0].grad[0]; }};
        joinable::Join guard{joinable::participants(ddp, step)};
        for (float const x : joinable::shard(inputs, comm)) {
            float error = 0;
            ddp.forward([&] { error = model[0].value[0] * x - 3 * x; });
            ddp.backward([&](auto ready) {
                model[0].grad[0] = error * x;
                ready(0);
            });
            step.step();
        }
        guard.finish();
    });
}
