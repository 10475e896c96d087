// SPDX-License-Identifier: BSL-1.0
#pragma once

// What our layers cost on a GPU beside the calls below them. Both are measured in turn, round by round;
// printed are medians, and medians of the ratios within a round. Rank 0 prints.

#include <array>
#include <cstdio>
#include <memory>

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

/// Passes that copy gradients into place: what an iteration costs beside them is ours.
class CopyingPasses {
public:
    CopyingPasses(cudaStream_t stream, std::size_t elements)
        : stream_{stream}, source_{std::vector<float>(elements), stream} {}

    void forward(std::vector<Param> const&) {}
    template <class Ready>
    void backward(std::vector<Param> const& params, Ready const& ready) {
        for (std::size_t i = params.size(); i-- > 0;) {
            cuda(cudaMemcpyAsync(
                params[i].grad.data(),
                source_.buffer().data,
                source_.buffer().bytes(),
                cudaMemcpyDeviceToDevice,
                stream_
            ));
            ready(i);
        }
    }

private:
    cudaStream_t stream_;
    DeviceArray<float> source_;
};

/// Square matrices, as many as layers, whose gradients `passes` computes on the stream of the rank.
template <class Hosts, class Passes>
class Replica {
public:
    Replica(Rank<Hosts>& rank, Passes& passes, std::size_t layers, std::size_t width, bool views)
        : passes_{passes} {
        for (std::size_t layer = 0; layer < layers; ++layer) {
            params_.emplace_back(joinable::DType::f32, width * width, rank.device);
        }
        joinable::DataParallelOptions options;
        options.gradient_as_bucket_view = views;
        options.sync_at_end = false;
        ddp_ = std::make_unique<Parallel>(rank.comm, params_, options);
    }

    void iterate() {
        ddp_->forward([this] { passes_.forward(params_); });
        ddp_->backward([this](auto ready) { passes_.backward(params_, ready); });
    }
    void iterate_alone() {
        passes_.forward(params_);
        passes_.backward(params_, [](std::size_t) {});
    }
    [[nodiscard]] auto& ddp() { return *ddp_; }

private:
    using Parallel = joinable::DistributedDataParallel<joinable::NcclCommunicator>;

    Passes& passes_;
    std::vector<Param> params_;
    std::unique_ptr<Parallel> ddp_;
};

/// Microseconds of a GPU: what an iteration takes longer than its passes alone.
struct Exposed {
    double copies, views, views_in_guard, passes;
};

/// Rank 0 prints. A guard adds roll calls of the hosts, and nothing on the GPU.
template <class Hosts, class Passes>
Exposed measure_iteration(
    Rank<Hosts>& rank, Passes& passes, std::size_t layers, std::size_t width, int rounds
) {
    Replica<Hosts, Passes> copies{rank, passes, layers, width, false};
    Replica<Hosts, Passes> views{rank, passes, layers, width, true};
    std::vector<std::vector<double>> exposed(3); // copies, views, views in a guard
    std::vector<double> alone;
    std::vector<double> more_of_host;
    int calls = 2;
    for (int round = -2; round < rounds; ++round) {
        double const a = time_calls(rank, rank.stream, calls, [&] { views.iterate_alone(); }).gpu;
        Times const c = time_calls(rank, rank.stream, calls, [&] { copies.iterate(); });
        Times const v = time_calls(rank, rank.stream, calls, [&] { views.iterate(); });
        joinable::Join guard{joinable::participants(views.ddp()), joinable::control(rank.hosts)};
        Times const g = time_calls(rank, rank.stream, calls, [&] { views.iterate(); });
        (void)guard.finish();
        if (round < 0) { // they warm up, and buckets are cut
            calls = std::max(1, calls_for(rank, c.gpu, 4 * rounds, 60));
            continue;
        }
        alone.push_back(a);
        exposed[0].push_back(c.gpu - a);
        exposed[1].push_back(v.gpu - a);
        exposed[2].push_back(g.gpu - a);
        more_of_host.push_back(g.host - v.host);
    }
    Exposed const result{median(exposed[0]), median(exposed[1]), median(exposed[2]), median(alone)};
    if (rank.hosts.rank() == 0) {
        std::printf(
            "joinable: %zu gradients, %.1f million numbers, %d ranks: exposed us: copies %.1f, "
            "views %.1f, views in a guard %.1f (of the host %.2f more); the passes alone %.1f\n",
            layers,
            1e-6 * static_cast<double>(layers * width * width),
            rank.hosts.size(),
            result.copies,
            result.views,
            result.views_in_guard,
            median(more_of_host),
            result.passes
        );
    }
    return result;
}

} // namespace joinable_gpu
