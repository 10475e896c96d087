// SPDX-License-Identifier: BSL-1.0
#pragma once

// An iteration of data-parallel training beside its passes alone, in several variants in turn.

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gpu/measurements.hpp>

namespace joinable_gpu {

/// Keeps a stream from running later work until release(). A call of the host that waits for the
/// stream would never return, so the stream goes on by itself after 50 ms.
class Hold {
public:
    explicit Hold(cudaStream_t stream) {
        auto shared = std::make_unique<std::shared_ptr<State>>(state_);
        cuda(cudaLaunchHostFunc(stream, &wait, shared.get()));
        static_cast<void>(shared.release()); // wait() owns it
    }
    Hold(Hold const&) = delete;
    Hold& operator=(Hold const&) = delete;
    ~Hold() { release(); }

    void release() {
        if (!std::exchange(is_released_, true)) {
            state_->released.set_value();
        }
    }
    /// Whether the stream was held until release(). Ask when its work has run.
    [[nodiscard]] bool has_held() const { return state_->has_held; }

private:
    struct State {
        std::promise<void> released;
        bool has_held = false;
    };
    static void wait(void* data) {
        std::unique_ptr<std::shared_ptr<State>> const shared{
            static_cast<std::shared_ptr<State>*>(data)
        };
        State& state = **shared;
        state.has_held = state.released.get_future().wait_for(std::chrono::milliseconds{50}) ==
                         std::future_status::ready;
    }

    std::shared_ptr<State> state_ = std::make_shared<State>();
    bool is_released_ = false;
};

/// Microseconds of the GPU alone for one of `calls` calls. The host leaves all of them on the
/// rank's stream before the first one runs, so time of the host is no part of it, unless a call
/// waits for the stream: then `is_alone` is false.
struct DeviceTime {
    double gpu;
    bool is_alone;
};
template <class Hosts, class Call>
DeviceTime time_device(Rank<Hosts>& rank, int calls, Call const& call) {
    Event const start;
    Event const stop;
    rank.comm.synchronize();
    rank.comm.barrier();
    Hold hold{rank.stream};
    cuda(cudaEventRecord(start, rank.stream));
    for (int i = 0; i < calls; ++i) {
        call();
    }
    cuda(cudaEventRecord(stop, rank.stream));
    hold.release();
    rank.comm.synchronize();
    cuda(cudaEventSynchronize(stop));
    float milliseconds = 0;
    cuda(cudaEventElapsedTime(&milliseconds, start, stop));
    return {1000.0 * milliseconds / calls, hold.has_held()};
}

/// A way to run an iteration. `within(body)` calls `body()` in what surrounds many iterations.
struct Variant {
    char const* name;
    std::function<void()> iterate;
    std::function<void(std::function<void()> const&)> within = [](auto const& body) { body(); };
};

/// What an iteration costs beside the passes alone, in microseconds. Elapsed is the time between two
/// events on the stream, with whatever time of the host the GPU had to wait for. Medians over
/// rounds, of differences and ratios within a round.
struct Iteration {
    std::string name;
    double passes, exposed, ratio;                      ///< elapsed
    double device_passes, device_exposed, device_ratio; ///< see DeviceTime
    double host;                                        ///< until it could go on
    bool is_alone;                                      ///< the device's times are
};

/// Collective. The first of the variants is the passes alone. Two further rounds warm up.
template <class Hosts>
std::vector<Iteration>
measure_variants(Rank<Hosts>& rank, std::vector<Variant> const& variants, int rounds) {
    std::vector<std::vector<Times>> elapsed(variants.size());
    std::vector<std::vector<double>> device(variants.size());
    std::vector<char> is_alone(variants.size(), 1);
    int calls = 2;
    for (int round = -2; round < rounds; ++round) {
        double longest = 0;
        for (std::size_t v = 0; v < variants.size(); ++v) {
            variants[v].within([&] {
                Times const times = time_calls(rank, rank.stream, calls, variants[v].iterate);
                // NCCL and the driver take only so many calls that have not run.
                auto const [gpu, alone] =
                    time_device(rank, (std::min)(calls, 5), variants[v].iterate);
                longest = (std::max)(longest, times.gpu);
                if (round >= 0) {
                    elapsed[v].push_back(times);
                    device[v].push_back(gpu);
                    is_alone[v] = is_alone[v] != 0 && alone ? 1 : 0;
                }
            });
        }
        if (round < 0) { // buckets are cut
            auto const times = 2 * rounds * static_cast<int>(variants.size());
            calls = (std::max)(1, calls_for(rank, longest, times, 60));
        }
    }
    std::vector<Iteration> result;
    for (std::size_t v = 0; v < variants.size(); ++v) {
        auto const middle = [&](auto const& value) {
            std::vector<double> values;
            for (std::size_t round = 0; round < device[v].size(); ++round) {
                values.push_back(value(round));
            }
            return median(values);
        };
        auto const& passes = elapsed[0];
        result.push_back(
            {variants[v].name,
             middle([&](std::size_t r) { return passes[r].gpu; }),
             middle([&](std::size_t r) { return elapsed[v][r].gpu - passes[r].gpu; }),
             middle([&](std::size_t r) { return elapsed[v][r].gpu / passes[r].gpu; }),
             middle([&](std::size_t r) { return device[0][r]; }),
             middle([&](std::size_t r) { return device[v][r] - device[0][r]; }),
             middle([&](std::size_t r) { return device[v][r] / device[0][r]; }),
             middle([&](std::size_t r) { return elapsed[v][r].host; }),
             is_alone[v] != 0 && is_alone[0] != 0}
        );
    }
    return result;
}

/// A line for each variant, which begins with `name`. ddp_torch.py reads such lines.
inline void
write(std::FILE* file, std::string const& name, std::vector<Iteration> const& iterations) {
    for (Iteration const& i : iterations) {
        std::fprintf(
            file,
            "%s %s %.2f %.2f %.4f %.2f %.2f %.4f %.2f %d\n",
            name.c_str(),
            i.name.c_str(),
            i.passes,
            i.exposed,
            i.ratio,
            i.device_passes,
            i.device_exposed,
            i.device_ratio,
            i.host,
            i.is_alone ? 1 : 0
        );
    }
}

/// Passes that copy gradients into place: what an iteration costs beside them is ours.
class CopyingPasses {
public:
    static constexpr joinable::DType dtype = joinable::DType::f32;

    CopyingPasses(cudaStream_t stream, std::size_t elements)
        : stream_{stream}, source_{std::vector<float>(elements), stream} {}

    void initialize(std::vector<Param> const&) {}
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
            params_.emplace_back(Passes::dtype, width * width, rank.device);
        }
        passes_.initialize(params_);
        joinable::DataParallelOptions options;
        options.gradient_as_bucket_view = views;
        options.sync_at_end = false;
        ddp_ = std::make_unique<Parallel>(rank.comm, params_, options);
    }

    void iterate(joinable::RoundNotice const& notice = {}) {
        ddp_->forward([this] { passes_.forward(params_); }, notice);
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

/// A guard of one participant around many iterations. It adds roll calls of the hosts.
template <class Hosts, class Ddp>
auto in_guard(Hosts& hosts, Ddp& ddp) {
    return [&](std::function<void()> const& body) {
        joinable::Join guard{joinable::participants(ddp), joinable::control(hosts)};
        body();
        static_cast<void>(guard.finish());
    };
}

/// Rank 0 prints. Returns what it prints.
template <class Hosts, class Passes>
std::vector<Iteration> measure_iteration(
    Rank<Hosts>& rank, Passes& passes, std::size_t layers, std::size_t width, int rounds
) {
    Replica<Hosts, Passes> copies{rank, passes, layers, width, false};
    Replica<Hosts, Passes> views{rank, passes, layers, width, true};
    auto const guarded = in_guard(rank.hosts, views.ddp());
    auto const result = measure_variants(
        rank,
        {{"passes", [&] { views.iterate_alone(); }},
         {"copies", [&] { copies.iterate(); }},
         {"views", [&] { views.iterate(); }},
         {"views,guard", [&] { views.iterate(); }, guarded},
         {"views,guard,weights", [&] { views.iterate({.weight = 32}); }, guarded}},
        rounds
    );
    if (rank.hosts.rank() == 0) {
        std::printf(
            "%zu gradients, %.1f million numbers of %zu bytes, %d ranks; microseconds: passes alone, exposed, "
            "ratio; the same for the GPU alone; of the host; 1 if the GPU was alone\n",
            layers,
            1e-6 * static_cast<double>(layers * width * width),
            joinable::size_of(Passes::dtype),
            rank.hosts.size()
        );
        write(stdout, "joinable", result);
    }
    return result;
}

} // namespace joinable_gpu
