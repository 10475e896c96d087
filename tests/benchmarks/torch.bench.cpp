// SPDX-License-Identifier: BSL-1.0
// Iterations of a perceptron of libtorch with 25 MB of gradients: torch_table.py runs it beside PyTorch.
//   bench_torch alone|threads|processes RANKS ITERATIONS
// prints the median of the milliseconds that an iteration takes, on rank 0.
#include <joinable/interop/torch.hpp>
#include <joinable/join.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string_view>
#include <vector>

#include <torch/torch.h>

namespace {

constexpr int batch_size = 16;

torch::nn::Sequential make_model() {
    return torch::nn::Sequential{
        torch::nn::Linear{1024, 2048},
        torch::nn::ReLU{},
        torch::nn::Linear{2048, 2048},
        torch::nn::ReLU{},
        torch::nn::Linear{2048, 10}
    };
}

/// Milliseconds, without the first iterations, which cut buckets and touch memory.
double median_of(int iterations, std::function<void()> const& iteration) {
    constexpr int warm_up = 5;
    std::vector<double> times;
    for (int i = 0; i < iterations + warm_up; ++i) {
        auto const begin = std::chrono::steady_clock::now();
        iteration();
        std::chrono::duration<double, std::milli> const taken =
            std::chrono::steady_clock::now() - begin;
        if (i >= warm_up) {
            times.push_back(taken.count());
        }
    }
    std::nth_element(times.begin(), times.begin() + iterations / 2, times.end());
    return times[static_cast<std::size_t>(iterations / 2)];
}

struct Batch {
    torch::Tensor inputs = torch::randn({batch_size, 1024});
    torch::Tensor labels = torch::randint(10, {batch_size}, torch::kLong);
};

void train_alone(int iterations) {
    torch::set_num_threads(1);
    torch::nn::Sequential model = make_model();
    torch::optim::SGD optimizer{model->parameters(), 0.01};
    Batch const batch;
    std::printf("%.2f\n", median_of(iterations, [&] {
                    optimizer.zero_grad();
                    torch::cross_entropy_loss(model->forward(batch.inputs), batch.labels)
                        .backward();
                    optimizer.step();
                }));
}

template <class Comm>
void train_together(Comm& comm, int iterations) {
    torch::set_num_threads(1);
    torch::nn::Sequential model = make_model();
    torch::optim::SGD optimizer{model->parameters(), 0.01};
    joinable::torch::DistributedDataParallel ddp{comm, model, {.gradient_as_bucket_view = true}};
    joinable::torch::Step step{comm, optimizer};
    joinable::Join join{joinable::participants(ddp, step)};
    Batch const batch;
    double const milliseconds = median_of(iterations, [&] {
        optimizer.zero_grad();
        torch::cross_entropy_loss(ddp.forward(batch.inputs), batch.labels).backward();
        step.step();
    });
    join.finish();
    if (comm.rank() == 0) {
        std::printf("%.2f\n", milliseconds);
        std::fflush(stdout);
    }
}

} // namespace

int main(int argc, char** argv) {
    if (argc != 4) {
        std::fprintf(stderr, "usage: bench_torch alone|threads|processes RANKS ITERATIONS\n");
        return 2;
    }
    std::string_view const kind = argv[1];
    int const ranks = std::atoi(argv[2]);
    int const iterations = std::atoi(argv[3]);
    if (kind == "threads") {
        joinable::run_threads(ranks, [=](joinable::ThreadCommunicator& comm) {
            train_together(comm, iterations);
        });
    } else if (kind == "processes") {
        joinable::run_processes(
            ranks,
            [=](joinable::ProcessCommunicator& comm) { train_together(comm, iterations); },
            {.other_threads = true} // of a BLAS, which starts its own again in a forked process
        );
    } else {
        train_alone(iterations);
    }
}
