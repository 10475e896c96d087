// SPDX-License-Identifier: BSL-1.0
// PyTorch's DataParallel over threads: each iteration replicates the model, scatters the batch, runs
// the replicas in threads, gathers their outputs and adds up their gradients.
// DistributedDataParallel replaced it. `data_parallel 15` measures both, 15 times in turn.
#include "layers.hpp"

#include <joinable/join.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <future>
#include <iterator>
#include <vector>
using namespace examples;
using Model = std::vector<Layer>;
constexpr std::size_t ranks = 2;
std::vector<Model> replicate(Model const& model) {
    return std::vector<Model>(ranks, model);
}
std::vector<Batch> scatter(Batch const& batch) {
    std::vector<Batch> shards;
    for (std::size_t r = 0; r < ranks; ++r) {
        auto const rows = [&](Matrix const& all, std::size_t width) {
            auto const row = [&](std::size_t n) {
                return all.begin() + static_cast<std::ptrdiff_t>(n * width);
            };
            std::size_t const samples = all.size() / width;
            return Matrix(row(r * samples / ranks), row((r + 1) * samples / ranks));
        };
        shards.push_back({rows(batch.inputs, features), rows(batch.targets, targets)});
    }
    return shards;
}
/// Calls `run(r)` in a thread for each replica. Rethrows the exception of the lowest that threw.
template <class F>
void parallel_apply(std::size_t count, F run) {
    std::vector<std::future<void>> running; // a destructor waits for the thread
    for (std::size_t r = 0; r < count; ++r) {
        running.push_back(std::async(std::launch::async, run, r));
    }
    std::for_each(running.begin(), running.end(), [](auto& replica) { replica.get(); });
}
Matrix gather(std::vector<std::vector<Matrix>> const& activations) {
    Matrix all;
    for (std::vector<Matrix> const& own : activations) {
        all.insert(all.end(), own.back().begin(), own.back().end());
    }
    return all;
}
/// Adds the replicas' gradients up in one buffer and cuts it into those of `model`.
void reduce_add_coalesced(std::vector<Model> const& copies, Model& model) {
    Matrix sum;
    for (Model const& copy : copies) {
        Matrix flat;
        for (Layer const& layer : copy) {
            flat.insert(flat.end(), layer.grad.begin(), layer.grad.end());
        }
        sum.resize(flat.size());
        std::transform(flat.begin(), flat.end(), sum.begin(), sum.begin(), std::plus<>{});
    }
    for (auto at = sum.begin(); Layer & layer : model) {
        std::copy_n(at, layer.grad.size(), layer.grad.begin());
        at += static_cast<std::ptrdiff_t>(layer.grad.size());
    }
}
void step(Model& model) {
    std::for_each(model.begin(), model.end(), [](Layer& layer) { layer.step(rate); });
}
void train_data_parallel(Model& model, std::vector<Batch> const& batches) {
    for (Batch const& batch : batches) {
        std::vector<Model> copies = replicate(model);
        std::vector<Batch> const shards = scatter(batch);
        std::vector<std::vector<Matrix>> found(ranks);
        parallel_apply(ranks, [&](std::size_t r) {
            found[r] = forward(copies[r], shards[r].inputs);
        });
        Matrix const d = loss_gradient(gather(found), batch.targets, batch.samples());
        std::vector<Batch> const parts = scatter({{}, d});
        parallel_apply(ranks, [&](std::size_t r) {
            (void)backward(copies[r], found[r], parts[r].targets, [](std::size_t) {});
        });
        reduce_add_coalesced(copies, model);
        step(model);
    }
}
void train_ddp(Model& model, std::vector<Batch> const& batches) {
    joinable::run_threads(ranks, [&](joinable::ThreadCommunicator& comm) {
        Model own = model;
        joinable::DistributedDataParallel ddp{comm, own};
        for (Batch const& batch : batches) {
            Batch const shard = scatter(batch)[static_cast<std::size_t>(comm.rank())];
            std::vector<Matrix> found;
            auto const pass = [&] { found = forward(own, shard.inputs); };
            ddp.forward(pass, {.weight = shard.samples()});
            ddp.backward([&](auto ready) {
                Matrix const d = loss_gradient(found.back(), shard.targets, shard.samples());
                (void)backward(own, found, d, ready);
            });
            step(own);
        }
        comm.barrier(); // all have copied `model`
        if (comm.rank() == 0) {
            model = own;
        }
    });
}
void measure(std::size_t rounds) {
    std::vector<Batch> const batches(10, make_shard(0)[1]); // 6 samples each
    std::array<std::vector<double>, 2> times;
    for (std::size_t k = 0; k < 2 * rounds; ++k) {
        Model model = make_layers(20'000); // 3.2 MB
        auto const start = std::chrono::steady_clock::now();
        (k % 2 == 0 ? train_data_parallel : train_ddp)(model, batches);
        std::chrono::duration<double> const seconds = std::chrono::steady_clock::now() - start;
        times[k % 2].push_back(100 * seconds.count()); // ms of an iteration
    }
    for (std::vector<double>& own : times) {
        std::sort(own.begin(), own.end());
        std::printf("%.2f ms (%.2f to %.2f)\n", own[own.size() / 2], own[0], own.back());
    }
}
int main(int count, char** arguments) {
    if (count > 1) {
        std::size_t const rounds = std::strtoul(arguments[1], nullptr, 10);
        return rounds > 0 ? (measure(rounds), 0) : (std::puts("usage: data_parallel [ROUNDS]"), 2);
    }
    std::vector<Batch> batches;
    for (int epoch = 0; epoch < epochs; ++epoch) {
        std::ranges::copy(make_shard(0), std::back_inserter(batches));
    }
    Model const alone = train_alone(1);
    std::array<Model, 2> models{make_layers(), make_layers()};
    train_data_parallel(models[0], batches);
    train_ddp(models[1], batches);
    double const off = std::max(difference(models[0], alone), difference(models[1], alone));
    std::printf("both are the same as one thread: %s\n", off < 1e-12 ? "yes" : "NO");
    try {
        parallel_apply(4, [](std::size_t r) { r < 2 ? void() : throw r; });
    } catch (std::size_t replica) {
        std::printf("replicas 2 and 3 throw, so parallel_apply throws that of %zu\n", replica);
    }
}
// Output:
// both are the same as one thread: yes
// replicas 2 and 3 throw, so parallel_apply throws that of 2
