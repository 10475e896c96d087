// SPDX-License-Identifier: BSL-1.0
// An iteration of the reducer beside one bare sum of as many bytes: what buckets and packing cost.
#include <benchmark/benchmark.h>

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <joinable/bucket/reducer.hpp>
#include <joinable/communicator/shared_memory/run_threads.hpp>
#include <joinable/communicator/shared_memory/thread.hpp>

#include "weights.hpp"

namespace {

using joinable_benchmarks::Weights;
using Clock = std::chrono::steady_clock;

/// Times `iterations` calls of what `make(comm)` returns on two ranks, seen by rank 0.
template <class Make>
void measure(benchmark::State& state, int iterations, std::size_t bytes, Make const& make) {
    for (auto _ : state) {
        double seconds = 0;
        joinable::run_threads(2, [&](joinable::ThreadCommunicator& comm) {
            auto iterate = make(comm);
            iterate(); // the first one touches the memory
            comm.barrier();
            auto const start = Clock::now();
            for (int i = 0; i < iterations; ++i) {
                iterate();
            }
            if (comm.rank() == 0) {
                seconds = std::chrono::duration<double>(Clock::now() - start).count();
            }
        });
        state.SetIterationTime(seconds / iterations);
    }
    auto const total = static_cast<double>(bytes) * static_cast<double>(state.iterations());
    state.counters["bytes/s"] = benchmark::Counter{total, benchmark::Counter::kIsRate};
}

int iterations_for(std::size_t numel) {
    return numel < 1000 ? 2000 : 20;
}

/// The floor: the same bytes in one sum. Arguments: tensors, elements of each.
void bare_sum(benchmark::State& state) {
    auto const count = static_cast<std::size_t>(state.range(0) * state.range(1));
    auto const numel = static_cast<std::size_t>(state.range(1));
    measure(
        state,
        iterations_for(numel),
        count * sizeof(float),
        [&](joinable::ThreadCommunicator& comm) {
            return [&comm, gradients = std::vector<float>(count)]() mutable {
                comm.all_reduce(joinable::to_buffer(gradients), joinable::ReduceOp::sum).wait();
            };
        }
    );
}

void reduce(benchmark::State& state, bool views) {
    auto const tensors = static_cast<std::size_t>(state.range(0));
    auto const numel = static_cast<std::size_t>(state.range(1));
    std::size_t const bytes = tensors * numel * sizeof(float);
    measure(state, iterations_for(numel), bytes, [&](joinable::ThreadCommunicator& comm) {
        struct Model {
            std::vector<Weights> weights;
            std::optional<joinable::Reducer<joinable::ThreadCommunicator>> reducer;
        };
        auto model = std::make_unique<Model>();
        for (std::size_t i = 0; i < tensors; ++i) {
            model->weights.emplace_back(numel);
        }
        model->reducer.emplace(
            comm,
            joinable::parameters(model->weights),
            joinable::BucketOptions{.gradient_as_bucket_view = views}
        );
        return [model = std::move(model), tensors] {
            model->reducer->prepare_for_backward(0.5);
            for (std::size_t i = tensors; i-- > 0;) {
                model->reducer->mark_ready(i);
            }
            model->reducer->finalize_backward();
        };
    });
}
void reduce_copies(benchmark::State& state) {
    reduce(state, false);
}
void reduce_views(benchmark::State& state) {
    reduce(state, true);
}

void sizes(benchmark::internal::Benchmark* registered) {
    registered->Args({160, 64})->Args({160, 65536})->UseManualTime()->Iterations(7);
}
BENCHMARK(bare_sum)->Apply(sizes);
BENCHMARK(reduce_copies)->Apply(sizes);
BENCHMARK(reduce_views)->Apply(sizes);

} // namespace
