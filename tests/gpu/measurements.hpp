// SPDX-License-Identifier: BSL-1.0
#pragma once

// What our layers cost on a GPU beside the calls below them. Both are measured in turn, round by round;
// printed are medians, and medians of the ratios within a round. Rank 0 prints.

#include <array>
#include <cstdio>

#include <gpu/common.hpp>

namespace joinable_gpu {

/// Microseconds of one call.
struct Times {
    double gpu;  ///< between two events on its stream
    double host; ///< until the host could go on
};

class Event {
public:
    Event() { cuda(cudaEventCreateWithFlags(&event_, cudaEventDefault)); }
    Event(Event const&) = delete;
    Event& operator=(Event const&) = delete;
    ~Event() { cudaEventDestroy(event_); }
    operator cudaEvent_t() const noexcept { return event_; }

private:
    cudaEvent_t event_ = nullptr;
};

/// Runs `call()`, which leaves work on the stream, `calls` times. All ranks begin together.
template <class Hosts, class Call>
Times time_calls(Rank<Hosts>& rank, cudaStream_t stream, int calls, Call const& call) {
    Event const start;
    Event const stop;
    rank.comm.synchronize();
    rank.comm.barrier();
    cuda(cudaEventRecord(start, stream));
    auto const begun = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) {
        call();
    }
    std::chrono::duration<double, std::micro> const host = std::chrono::steady_clock::now() - begun;
    cuda(cudaEventRecord(stop, stream));
    rank.comm.synchronize();
    cuda(cudaEventSynchronize(stop));
    float milliseconds = 0;
    cuda(cudaEventElapsedTime(&milliseconds, start, stop));
    return {1000.0 * milliseconds / calls, host.count() / calls};
}

/// How many calls make 20 ms, by rank 0's clock, up to 50: what NCCL's queue takes without a wait.
/// None, where the rounds would take longer than `most`.
template <class Hosts>
int calls_for(Rank<Hosts>& rank, double microseconds, int rounds, double most_seconds = 12) {
    std::uint64_t calls = 0;
    if (2e-6 * microseconds * rounds < most_seconds) {
        calls = static_cast<std::uint64_t>(std::clamp(20'000 / (microseconds + 1), 1.0, 50.0));
    }
    rank.hosts.broadcast({&calls, 1, joinable::DType::u64}, 0).wait();
    return static_cast<int>(calls);
}

[[nodiscard]] inline char const* verdict(bool is_met) {
    return is_met ? "met" : "missed";
}

/// NCCL's own call, as a program makes it that waits for no other rank: until it is launched.
inline void raw_all_reduce(ncclComm_t comm, cudaStream_t stream, joinable::Buffer buffer) {
    void* const data = buffer.data;
    ncclResult_t state = ncclAllReduce(data, data, buffer.count, ncclFloat, ncclSum, comm, stream);
    while (state == ncclInProgress) {
        expect(ncclCommGetAsyncError(comm, &state) == ncclSuccess, "ncclCommGetAsyncError");
    }
    expect(state == ncclSuccess, "ncclAllReduce");
}

template <class Hosts>
void measure_all_reduce(Rank<Hosts>& rank, std::vector<std::size_t> const& sizes, int rounds) {
    bool const prints = rank.hosts.rank() == 0;
    if (prints) {
        std::printf(
            "all_reduce of f32 in place, %d ranks, microseconds; aims: ratio 1.01 from 1 MiB, 2 us "
            "of "
            "the host\n%10s %12s %8s %12s %12s %8s  aims\n",
            rank.hosts.size(),
            "bytes",
            "NCCL",
            "ratio",
            "NCCL's host",
            "ours more",
            "calls"
        );
    }
    for (std::size_t const bytes : sizes) {
        DeviceArray<float> const array{std::vector<float>(bytes / sizeof(float)), rank.stream};
        auto const raw = [&] {
            raw_all_reduce(rank.comm.native_handle(), rank.comm.stream(), array.buffer());
        };
        auto const ours = [&] {
            rank.comm.all_reduce(array.buffer(), joinable::ReduceOp::sum).wait();
        };
        (void)time_calls(rank, rank.comm.stream(), 2, raw);
        (void)time_calls(rank, rank.stream, 2, ours);
        auto const once = time_calls(rank, rank.comm.stream(), 2, raw);
        int const calls = calls_for(rank, once.gpu, rounds);
        if (calls == 0) {
            if (prints) {
                std::printf("%10zu skipped: a call takes %.2f s\n", bytes, 1e-6 * once.gpu);
            }
            continue;
        }
        std::vector<double> gpu;
        std::vector<double> ratio;
        std::vector<double> host;
        std::vector<double> more;
        for (int round = 0; round < rounds; ++round) {
            Times const r = time_calls(rank, rank.comm.stream(), calls, raw);
            Times const o = time_calls(rank, rank.stream, calls, ours);
            gpu.push_back(r.gpu);
            ratio.push_back(o.gpu / r.gpu);
            host.push_back(r.host);
            more.push_back(o.host - r.host);
        }
        if (prints) {
            bool const is_large = bytes >= std::size_t{1} << 20U && rank.hosts.size() > 1;
            std::printf(
                "%10zu %12.2f %8.3f %12.2f %12.2f %8d  %s%s\n",
                bytes,
                median(gpu),
                median(ratio),
                median(host),
                median(more),
                calls,
                is_large ? (median(ratio) < 1.01 ? "met, " : "missed, ") : "",
                verdict(median(more) < 2)
            );
        }
    }
}

/// What the host spends in a call: NCCL's own of a blocking handle and of a non-blocking one, for which NCCL
/// makes a thread in each call, and ours. Rank 0 prints medians.
template <class Hosts>
void measure_host_time(Rank<Hosts>& rank, std::size_t bytes, int calls, int rounds) {
    EnginesHandle const blocking{rank.hosts, true};
    EnginesHandle const non_blocking{rank.hosts, false};
    DeviceArray<float> const array{std::vector<float>(bytes / sizeof(float)), rank.stream};
    auto const raw = [&](EnginesHandle const& engine) {
        raw_all_reduce(engine.comm, rank.stream, array.buffer());
    };
    std::array<std::vector<double>, 3> host;
    std::vector<double> more;
    for (int round = -1; round < rounds; ++round) { // the first one warms up
        std::array const times{
            time_calls(rank, rank.stream, calls, [&] { raw(blocking); }).host,
            time_calls(rank, rank.stream, calls, [&] { raw(non_blocking); }).host,
            time_calls(
                rank,
                rank.stream,
                calls,
                [&] { rank.comm.all_reduce(array.buffer(), joinable::ReduceOp::sum).wait(); }
            ).host
        };
        for (std::size_t i = 0; round >= 0 && i < times.size(); ++i) {
            host[i].push_back(times[i]);
        }
        if (round >= 0) {
            more.push_back(times[2] - times[1]);
        }
    }
    if (rank.hosts.rank() == 0) {
        std::printf(
            "host time of an all_reduce of %zu B, %d ranks, microseconds: a blocking handle %.2f, a "
            "non-blocking one %.2f, ours %.2f, which is %.2f more than the non-blocking one, aim 2: %s\n",
            bytes,
            rank.hosts.size(),
            median(host[0]),
            median(host[1]),
            median(host[2]),
            median(more),
            verdict(median(more) <= 2)
        );
    }
}

} // namespace joinable_gpu
