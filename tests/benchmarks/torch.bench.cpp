// SPDX-License-Identifier: BSL-1.0
// Iterations of a perceptron of libtorch with 25 MB of gradients: torch_table.py runs it beside PyTorch.
//   bench_torch alone|threads|processes RANKS ITERATIONS [WAY]
// prints the median of the milliseconds that an iteration takes, on rank 0. WAY is what ranks do:
//   views     average gradients as views of buckets (if it is not given). Each iteration releases
//             gradients first, as zero_grad() of libtorch 2, so autograd makes each anew, and it is
//             copied into its bucket
//   kept      the same, after zero_grad(false), which clears the views and keeps them
//   copies    average gradients that lie in memory of their own
//   unsynced  make the passes of DistributedDataParallel, hooks and all, and sum nothing
//   meet      train each alone, and meet after each iteration
//   apart     train each alone, at the same time
#include <joinable/interop/torch.hpp>
#include <joinable/join.hpp>

#include <algorithm>
#include <array>
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

enum class Way { views, kept, copies, unsynced, meet, apart };

template <class Comm>
double train(Comm& comm, Way way, int iterations) {
    torch::set_num_threads(1);
    torch::nn::Sequential model = make_model();
    torch::optim::SGD optimizer{model->parameters(), 0.01};
    Batch const batch;
    auto const learn = [&](auto const& forward) {
        model->zero_grad(way != Way::kept); // true: releases them
        torch::cross_entropy_loss(forward(), batch.labels).backward();
    };
    if (way == Way::meet || way == Way::apart) {
        return median_of(iterations, [&] {
            learn([&] { return model->forward(batch.inputs); });
            optimizer.step();
            if (way == Way::meet) {
                comm.barrier();
            }
        });
    }
    bool const has_views = way == Way::views || way == Way::kept;
    joinable::torch::DistributedDataParallel ddp{
        comm, model, {.gradient_as_bucket_view = has_views}
    };
    joinable::torch::Step step{comm, optimizer};
    joinable::Join join{joinable::participants(ddp, step)};
    double const milliseconds = median_of(iterations, [&] {
        learn([&] { return ddp.forward({.will_sync = way != Way::unsynced}, batch.inputs); });
        if (way == Way::unsynced) {
            optimizer.step(); // a Step waits for a round that averages
        } else {
            step.step();
        }
    });
    join.finish();
    return milliseconds;
}

template <class Comm>
void print(Comm& comm, Way way, int iterations) {
    double const milliseconds = train(comm, way, iterations);
    if (comm.rank() == 0) {
        std::printf("%.2f\n", milliseconds);
        std::fflush(stdout);
    }
}

} // namespace

int main(int argc, char** argv) {
    constexpr std::array<std::string_view, 6> ways{
        "views", "kept", "copies", "unsynced", "meet", "apart"
    };
    auto const way = std::find(ways.begin(), ways.end(), argc > 4 ? argv[4] : "views");
    if (argc < 4 || argc > 5 || way == ways.end()) {
        std::fprintf(
            stderr,
            "usage: bench_torch alone|threads|processes RANKS ITERATIONS "
            "[views|kept|copies|unsynced|meet|apart]\n"
        );
        return 2;
    }
    std::string_view const kind = argv[1];
    int const ranks = std::atoi(argv[2]);
    int const iterations = std::atoi(argv[3]);
    auto const body = [=, way = static_cast<Way>(way - ways.begin())](auto& comm) {
        print(comm, way, iterations);
    };
    if (kind == "threads") {
        joinable::run_threads(ranks, [=](joinable::ThreadCommunicator& comm) { body(comm); });
    } else if (kind == "processes") {
        // Other threads: of a BLAS, which starts its own again in a forked process.
        joinable::run_processes(
            ranks, [=](joinable::ProcessCommunicator& comm) { body(comm); }, {.other_threads = true}
        );
    } else {
        joinable::SelfCommunicator comm;
        print(comm, Way::apart, iterations);
    }
}
