// SPDX-License-Identifier: BSL-1.0
#pragma once

// How much of an iteration the gradients' travel exposes: four buckets become ready one by one during
// a backward pass that keeps the GPU busy.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <gpu/measurements.hpp>
#include <gpu/streams.hpp>

namespace joinable_gpu {

struct OverlapSizes {
    std::size_t elements; ///< of each of the four parameters, of which each is a bucket
    int rounds;
};

struct Overlapped {
    char const* name;
    bool finds_unused = false;
    bool has_weights = false;
    bool views = false;
    bool has_guard = false;
    bool is_sharded = false;
    joinable::Sharding sharding = joinable::Sharding::none; ///< where it is sharded
    bool clips = false;
};

/// What one iteration took: milliseconds, and buckets that were posted before the pass had run on the
/// GPU.
struct Exposure {
    double exposed;
    double host; ///< until backward() returned
    std::size_t early;
};

/// A rank with four parameters, whose gradients take the GPU `spin` each.
class BusyEngine {
public:
    BusyEngine(ThreadHosts& hosts, Machine const& machine, OverlapSizes const& sizes)
        : hosts_{hosts}, machine_{machine}, device_{share_device(hosts)},
          bytes_{sizes.elements * sizeof(float)},
          source_{
              std::vector<float>(sizes.elements, static_cast<float>(hosts.rank() + 1)), stream_
          },
          comm_{hosts, options()} {
        for (int i = 0; i < 4; ++i) {
            params_.emplace_back(joinable::DType::f32, sizes.elements, device_);
        }
        comm_.synchronize();
    }

    template <class Ready>
    void backward(Ready const& ready) {
        for (std::size_t p = params_.size(); p-- > 0;) {
            machine_.spin(stream_);
            copy_on_device(params_[p].grad.data(), source_.buffer().data, bytes_, stream_);
            if (p == 0) {
                cuda(cudaEventRecord(end_of_pass_, stream_));
                is_enqueued_ = true;
            }
            ready(p);
        }
    }
    /// All ranks run `iterate()` at the same time. Returns milliseconds of the stream.
    template <class Iterate>
    double time(Iterate const& iterate) {
        comm_.synchronize();
        hosts_.barrier();
        is_enqueued_ = false;
        early_ = 0;
        cuda(cudaEventRecord(start_, stream_));
        iterate();
        cuda(cudaEventRecord(stop_, stream_));
        comm_.synchronize();
        cuda(cudaEventSynchronize(stop_));
        float milliseconds = 0;
        cuda(cudaEventElapsedTime(&milliseconds, start_, stop_));
        return milliseconds;
    }
    [[nodiscard]] PinnedCommunicator& comm() noexcept { return comm_; }
    [[nodiscard]] std::vector<Param>& params() noexcept { return params_; }
    [[nodiscard]] std::size_t early() const noexcept { return early_; }
    [[nodiscard]] std::size_t bucket_bytes() const noexcept { return bytes_; }
    /// Milliseconds of a bucket that travels alone.
    double time_bucket() {
        return time([&] {
            joinable::Buffer const bucket{
                params_[0].grad.data(), bytes_ / sizeof(float), joinable::DType::f32
            };
            comm_.all_reduce(bucket, joinable::ReduceOp::sum).wait();
        });
    }
    void expect_averages() {
        float const due = static_cast<float>(comm_.size() + 1) / 2;
        for (Param const& param : params_) {
            std::vector<float> values(param.grad.numel());
            cuda(cudaMemcpyAsync(
                values.data(), param.grad.data(), bytes_, cudaMemcpyDeviceToHost, stream_
            ));
            comm_.synchronize();
            for (float const value : values) {
                expect(
                    value == due,
                    "an average is " + std::to_string(value) + ", not " + std::to_string(due)
                );
            }
        }
    }

private:
    [[nodiscard]] PinnedOptions options() {
        return {
            .kernels = machine_.kernels,
            .caller = stream_,
            .on_post =
                [this](auto const& buffer) {
                    if (buffer.bytes() >= bytes_ && is_before_the_end()) {
                        ++early_;
                    }
                }
        };
    }
    [[nodiscard]] bool is_before_the_end() const {
        bool const is_before = !is_enqueued_ || cudaEventQuery(end_of_pass_) == cudaErrorNotReady;
        static_cast<void>(cudaGetLastError());
        return is_before;
    }

    // In this order: events, streams and memory are those of the current device.
    ThreadHosts& hosts_;
    Machine const& machine_;
    int device_;
    std::size_t bytes_;
    Event start_;
    Event stop_;
    Event end_of_pass_;
    bool is_enqueued_ = false;
    std::size_t early_ = 0;
    Stream stream_{};
    DeviceArray<float> source_;
    PinnedCommunicator comm_;
    std::vector<Param> params_;
};

/// Medians of rounds; the pass alone and the iteration in turn.
template <class Iterate>
Exposure measure_exposure(BusyEngine& engine, int rounds, Iterate const& iterate) {
    std::vector<double> exposed;
    std::vector<double> host;
    std::size_t early = 4;
    for (int round = -2; round < rounds; ++round) {
        double const alone = engine.time([&] { engine.backward([](std::size_t) {}); });
        double held = 0;
        double const whole = engine.time([&] { held = iterate(); });
        if (round >= 0) { // two warm up, and buckets are cut
            exposed.push_back(whole - alone);
            host.push_back(held);
            early = (std::min)(early, engine.early());
        }
    }
    return {median(exposed), median(host), early};
}

[[nodiscard]] inline double milliseconds_of(std::function<void()> const& f) {
    auto const begun = std::chrono::steady_clock::now();
    f();
    std::chrono::duration<double, std::milli> const took = std::chrono::steady_clock::now() - begun;
    return took.count();
}

template <class Participant>
Exposure measure_passes(
    ThreadHosts& hosts,
    BusyEngine& engine,
    Participant& participant,
    Overlapped const& how,
    int rounds
) {
    std::optional<joinable::Join<Participant>> guard;
    if (how.has_guard) {
        guard.emplace(joinable::participants(participant), joinable::control(hosts));
    }
    Exposure const result = measure_exposure(engine, rounds, [&] {
        if (how.has_weights) {
            participant.forward([] {}, {.weight = 1});
        } else {
            participant.forward([] {});
        }
        double const held = milliseconds_of([&] {
            participant.backward([&](auto ready) { engine.backward(ready); });
        });
        if constexpr (requires { participant.step(); }) {
            participant.step();
        }
        return held;
    });
    if (guard) {
        (void)guard->finish();
    }
    return result;
}

inline Exposure measure_overlap_of(
    ThreadHosts& hosts, Machine const& machine, OverlapSizes const& sizes, Overlapped const& how
) {
    BusyEngine engine{hosts, machine, sizes};
    if (how.is_sharded) {
        joinable::ShardedOptions options{
            .sharding = how.sharding, .bucket_cap_bytes = engine.bucket_bytes()
        };
        joinable::ClipNorm clip{1.0};
        if (how.clips) {
            options.before_step = std::ref(clip);
        }
        joinable::ShardedDataParallel sharded{
            engine.comm(), engine.params(), joinable::Sgd{.learning_rate = 0.5}, options
        };
        return measure_passes(hosts, engine, sharded, how, sizes.rounds);
    }
    joinable::DistributedDataParallel ddp{
        engine.comm(),
        engine.params(),
        {.bucket_cap_bytes = engine.bucket_bytes(),
         .first_bucket_bytes = engine.bucket_bytes(),
         .gradient_as_bucket_view = how.views,
         .find_unused = how.finds_unused}
    };
    Exposure const result = measure_passes(hosts, engine, ddp, how, sizes.rounds);
    engine.expect_averages();
    return result;
}

/// A table, which rank 0 prints. Returns how many of the four buckets the first row posted early.
inline std::size_t
measure_overlap(ThreadHosts& hosts, Machine const& machine, OverlapSizes const& sizes) {
    using joinable::Sharding;
    bool const prints = hosts.rank() == 0;
    double bucket = 0;
    {
        BusyEngine engine{hosts, machine, sizes};
        std::vector<double> times;
        for (int round = -1; round < sizes.rounds; ++round) {
            double const took = engine.time_bucket();
            if (round >= 0) {
                times.push_back(took);
            }
        }
        bucket = median(times);
    }
    if (prints) {
        std::printf(
            "overlap, %d ranks: 4 buckets of %zu bytes, of which one alone takes %.2f ms; aim: "
            "exposed below %.2f ms\n%-32s %10s %14s %10s  aim\n",
            hosts.size(),
            sizes.elements * sizeof(float),
            bucket,
            bucket + 1,
            "",
            "exposed ms",
            "backward() ms",
            "early of 4"
        );
    }
    std::optional<std::size_t> first;
    for (Overlapped const& how : {
             Overlapped{.name = "copies"},
             Overlapped{.name = "views", .views = true},
             Overlapped{.name = "weights", .has_weights = true},
             Overlapped{.name = "weights, guard", .has_weights = true, .has_guard = true},
             Overlapped{.name = "find_unused", .finds_unused = true},
             Overlapped{.name = "find_unused, views", .finds_unused = true, .views = true},
             Overlapped{.name = "find_unused, guard", .finds_unused = true, .has_guard = true},
             Overlapped{
                 .name = "find_unused, weights, guard",
                 .finds_unused = true,
                 .has_weights = true,
                 .has_guard = true
             },
             Overlapped{
                 .name = "stage 1, step", .is_sharded = true, .sharding = Sharding::optimizer
             },
             Overlapped{
                 .name = "stage 1, step, clipped",
                 .is_sharded = true,
                 .sharding = Sharding::optimizer,
                 .clips = true
             },
             Overlapped{
                 .name = "stage 2, step", .is_sharded = true, .sharding = Sharding::gradients
             },
             Overlapped{
                 .name = "stage 2, step, clipped",
                 .is_sharded = true,
                 .sharding = Sharding::gradients,
                 .clips = true
             },
         }) {
        Exposure const found = measure_overlap_of(hosts, machine, sizes, how);
        first = first.value_or(found.early);
        if (prints) { // values travel after a sharded pass, which has no aim
            std::printf(
                "%-32s %10.2f %14.2f %10zu  %s\n",
                how.name,
                found.exposed,
                found.host,
                found.early,
                how.is_sharded ? "" : verdict(found.exposed < bucket + 1)
            );
        }
    }
    return *first;
}

} // namespace joinable_gpu
