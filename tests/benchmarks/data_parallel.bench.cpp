// SPDX-License-Identifier: BSL-1.0
// An iteration of DistributedDataParallel: what of its communication a backward pass hides, what packing
// costs beside memcpy, what the guard and the verbs cost where there is next to nothing to send, and what a
// timeline adds.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <memory>
#include <optional>
#include <type_traits>
#include <vector>

#include <joinable/join.hpp>
#include <joinable/trace.hpp>

#include "weights.hpp"

namespace {

using joinable_benchmarks::Weights;
using Clock = std::chrono::steady_clock;

constexpr std::size_t tensors = 160;

std::vector<Weights> make_model(std::size_t numel) {
    std::vector<Weights> model;
    for (std::size_t i = 0; i < tensors; ++i) {
        model.emplace_back(numel);
    }
    return model;
}

/// Stands in for the computation of one gradient: `passes` times over its memory.
void compute(Weights& weights, int passes) {
    auto const gradient = weights.grad.as<float>();
    float* const out = gradient.data();
    for (int pass = 0; pass < passes; ++pass) {
        for (std::size_t i = 0; i < weights.value.size(); ++i) {
            out[i] = weights.value[i] * 0.5F + static_cast<float>(pass);
        }
        benchmark::ClobberMemory();
    }
}

enum class Run { compute_only, bare_sum, after_pass, overlapped };

/// Arguments: elements per tensor, passes of computation. Time of an iteration on rank 0 of two.
template <class Times = joinable::NoTimeline>
void iteration_with(benchmark::State& state, Run run, bool views) {
    auto const numel = static_cast<std::size_t>(state.range(0));
    int const passes = static_cast<int>(state.range(1));
    int const iterations = numel < 1000 ? 2000 : 10;
    for (auto _ : state) {
        double seconds = 0;
        joinable::run_threads(2, [&](joinable::ThreadCommunicator& comm) {
            auto model = make_model(numel);
            std::vector<float> flat(run == Run::bare_sum ? tensors * numel : 0);
            joinable::
                DistributedDataParallel<joinable::ThreadCommunicator, joinable::AllReduce, Times>
                    ddp{comm, model, {.gradient_as_bucket_view = views}};
            if constexpr (std::is_same_v<Times, joinable::TraceTimeline>) {
                ddp.timeline().start(100'000);
            }
            joinable::Join guard{joinable::participants(ddp)};
            auto const iterate = [&] {
                if (run == Run::compute_only || run == Run::bare_sum) {
                    for (std::size_t i = tensors; i-- > 0;) {
                        compute(model[i], passes);
                    }
                    if (run == Run::bare_sum) {
                        comm.all_reduce(joinable::to_buffer(flat), joinable::ReduceOp::sum).wait();
                    }
                    return;
                }
                ddp.forward([] {});
                ddp.backward([&](auto ready) {
                    for (std::size_t i = tensors; i-- > 0;) {
                        compute(model[i], passes);
                        if (run == Run::overlapped) {
                            ready(i);
                        }
                    }
                    for (std::size_t i = tensors; run == Run::after_pass && i-- > 0;) {
                        ready(i);
                    }
                });
            };
            iterate();
            iterate(); // the buckets have been cut
            comm.barrier();
            auto const start = Clock::now();
            for (int i = 0; i < iterations; ++i) {
                iterate();
            }
            if (comm.rank() == 0) {
                seconds = std::chrono::duration<double>(Clock::now() - start).count();
            }
            guard.finish();
        });
        state.SetIterationTime(seconds / iterations);
    }
}
void iteration(benchmark::State& state, Run run, bool views) {
    iteration_with<>(state, run, views);
}
void recorded(benchmark::State& state, Run run, bool views) {
    iteration_with<joinable::TraceTimeline>(state, run, views);
}
void small_and_large(benchmark::internal::Benchmark* bench) {
    bench->Args({64, 0})->Args({65536, 8})->UseManualTime()->Iterations(7);
}
BENCHMARK_CAPTURE(iteration, compute_only, Run::compute_only, false)->Apply(small_and_large);
BENCHMARK_CAPTURE(iteration, bare_sum, Run::bare_sum, false)->Apply(small_and_large);
BENCHMARK_CAPTURE(iteration, after_pass, Run::after_pass, false)->Apply(small_and_large);
BENCHMARK_CAPTURE(iteration, overlapped, Run::overlapped, false)->Apply(small_and_large);
BENCHMARK_CAPTURE(iteration, overlapped_views, Run::overlapped, true)->Apply(small_and_large);
BENCHMARK_CAPTURE(recorded, overlapped_views, Run::overlapped, true)->Apply(small_and_large);

/// Packing all gradients and delivering them again, alone: one rank, so nothing is sent.
void pack_and_unpack(benchmark::State& state) {
    auto const numel = static_cast<std::size_t>(state.range(0));
    auto model = make_model(numel);
    joinable::SelfCommunicator comm;
    joinable::Reducer reducer{comm, joinable::parameters(model)};
    for (auto _ : state) {
        reducer.prepare_for_backward(0.5);
        for (std::size_t i = tensors; i-- > 0;) {
            reducer.mark_ready(i);
        }
        reducer.finalize_backward();
    }
    state.SetBytesProcessed(
        static_cast<std::int64_t>(2 * tensors * numel * sizeof(float)) * state.iterations()
    );
}
BENCHMARK(pack_and_unpack)->Arg(65536)->Arg(1024);

/// The same bytes to and fro.
void memcpy_both_ways(benchmark::State& state) {
    auto const numel = static_cast<std::size_t>(state.range(0));
    auto model = make_model(numel);
    std::vector<float> bucket(tensors * numel);
    for (auto _ : state) {
        for (std::size_t i = 0; i < tensors; ++i) {
            std::memcpy(&bucket[i * numel], model[i].storage.data(), numel * sizeof(float));
        }
        benchmark::ClobberMemory();
        for (std::size_t i = 0; i < tensors; ++i) {
            std::memcpy(model[i].storage.data(), &bucket[i * numel], numel * sizeof(float));
        }
        benchmark::ClobberMemory();
    }
    state.SetBytesProcessed(
        static_cast<std::int64_t>(2 * tensors * numel * sizeof(float)) * state.iterations()
    );
}
BENCHMARK(memcpy_both_ways)->Arg(65536)->Arg(1024);

} // namespace
