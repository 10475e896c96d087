// SPDX-License-Identifier: BSL-1.0
// A trainer of libtorch in one file, alone or (JOINABLE) over ranks: what compile_time.py measures.
#include <torch/torch.h>

#ifdef JOINABLE
#include <joinable/interop/torch.hpp>
#include <joinable/join.hpp>
#endif

int main() {
#ifdef JOINABLE
    joinable::run_threads(4, [&](joinable::ThreadCommunicator& comm) {
        torch::nn::Linear model{2, 3};
        torch::optim::SGD optimizer{model->parameters(), 0.1};
        joinable::torch::DistributedDataParallel ddp{comm, model};
        joinable::torch::Step step{comm, optimizer};
        joinable::Join join{joinable::participants(ddp, step)};
        for (int i = 0; i < 3 + comm.rank(); ++i) {
            optimizer.zero_grad();
            ddp.forward(torch::ones({1, 2})).sum().backward();
            step.step();
        }
        join.finish();
    });
#else
    torch::nn::Linear model{2, 3};
    torch::optim::SGD optimizer{model->parameters(), 0.1};
    for (int i = 0; i < 3; ++i) {
        optimizer.zero_grad();
        model->forward(torch::ones({1, 2})).sum().backward();
        optimizer.step();
    }
#endif
}
