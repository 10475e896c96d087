// SPDX-License-Identifier: BSL-1.0
// What a guard costs per iteration, beside the bare collective that it needs, a shadow round, and what it costs to
// start and end ranks.
#include <benchmark/benchmark.h>

#include <chrono>
#include <cstddef>
#include <cstdint>

#include <joinable/join.hpp>

namespace {

using Clock = std::chrono::steady_clock;
constexpr int iterations = 50'000;

struct Nothing {
    joinable::ThreadCommunicator& comm;
    joinable::JoinState state = {};

    struct Hook {
        void main_hook() {}
        void post_hook(bool) {}
    };
    Hook join_hook(joinable::arguments<joinable::keywords<>> const&) { return {}; }
    joinable::ThreadCommunicator& join_communicator() { return comm; }
    joinable::JoinState& join_state() { return state; }
};

/// Runs `body(comm)` on all ranks and counts the time of rank `timed` for each iteration.
template <class Body>
void measure(benchmark::State& state, int timed, Body const& body) {
    for (auto _ : state) {
        double seconds = 0;
        joinable::run_threads(static_cast<int>(state.range(0)), [&](auto& comm) {
            comm.barrier();
            auto const start = Clock::now();
            body(comm);
            if (comm.rank() == timed) {
                seconds = std::chrono::duration<double>(Clock::now() - start).count();
            }
        });
        state.SetIterationTime(seconds / iterations);
    }
}

/// The floor: one sum of seven words per iteration.
void bare_all_reduce(benchmark::State& state) {
    measure(state, 0, [](joinable::ThreadCommunicator& comm) {
        std::uint64_t words[7] = {};
        for (int i = 0; i < iterations; ++i) {
            comm.all_reduce({words, 7, joinable::DType::u64}, joinable::ReduceOp::sum).wait();
        }
    });
}
BENCHMARK(bare_all_reduce)->Arg(2)->Arg(4)->UseManualTime()->Iterations(11);

void guarded_iteration(benchmark::State& state) {
    measure(state, 0, [](joinable::ThreadCommunicator& comm) {
        Nothing nothing{comm};
        joinable::Join guard{joinable::participants(nothing)};
        for (int i = 0; i < iterations; ++i) {
            benchmark::DoNotOptimize(joinable::notify_join_context(nothing));
        }
        guard.finish();
    });
}
BENCHMARK(guarded_iteration)->Arg(2)->Arg(4)->UseManualTime()->Iterations(11);

void shadow_round(benchmark::State& state) {
    measure(state, 1, [](joinable::ThreadCommunicator& comm) {
        Nothing nothing{comm};
        joinable::Join guard{joinable::participants(nothing)};
        for (int i = 0; comm.rank() == 0 && i < iterations; ++i) {
            benchmark::DoNotOptimize(joinable::notify_join_context(nothing));
        }
        guard.finish();
    });
}
BENCHMARK(shadow_round)->Arg(2)->Arg(4)->UseManualTime()->Iterations(11);

/// A job of as many ranks from its start to its end, with one sum.
template <class Run>
void whole_job(benchmark::State& state, Run const& run) {
    for (auto _ : state) {
        run(static_cast<int>(state.range(0)), [](auto& comm) {
            float value = 1;
            comm.all_reduce({&value, 1, joinable::DType::f32}, joinable::ReduceOp::sum).wait();
        });
    }
}
void job_of_threads(benchmark::State& state) {
    whole_job(state, [](int ranks, auto body) { joinable::run_threads(ranks, body); });
}
BENCHMARK(job_of_threads)->Arg(2)->Arg(4)->UseRealTime()->Unit(benchmark::kMillisecond);
void job_of_processes(benchmark::State& state) {
    whole_job(state, [](int ranks, auto body) { joinable::run_processes(ranks, body); });
}
BENCHMARK(job_of_processes)->Arg(2)->Arg(4)->UseRealTime()->Unit(benchmark::kMillisecond);

} // namespace
