// SPDX-License-Identifier: BSL-1.0
#pragma once

// The order of streams, with every race provoked: a stream is busy before gradients are written and
// before they are read, and before each copy of a collective, and the host never waits in between. A
// missing event then gives wrong numbers. Ranks are threads, also several of one GPU.

#include <array>
#include <cstddef>
#include <cstdio>
#include <future>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpu/checks.hpp>
#include <gpu/pinned_communicator.hpp>

namespace joinable_gpu {

using ThreadHosts = joinable::ThreadCommunicator;

/// What a GPU does for these checks, and how much of it.
struct Machine {
    joinable::CudaKernels kernels;
    Spin spin; ///< of the current device
    std::size_t large;
};

/// Which stream the caller makes and uses gradients on.
enum class Caller { null, blocking, non_blocking, changing };

[[nodiscard]] inline char const* name_of(Caller caller) {
    switch (caller) {
    case Caller::null: return "the null stream";
    case Caller::blocking: return "a blocking stream";
    case Caller::non_blocking: return "a non-blocking stream";
    case Caller::changing: break;
    }
    return "another stream in each round";
}

/// The caller's stream of each round. The caller orders the streams.
class CallerStreams {
public:
    explicit CallerStreams(Caller caller) : caller_{caller} {
        cudaStream_t blocking = nullptr;
        cuda(cudaStreamCreateWithFlags(&blocking, cudaStreamDefault));
        blocking_ = {blocking, [](cudaStream_t stream) { cudaStreamDestroy(stream); }};
        current_ = stream_of(0);
    }
    [[nodiscard]] cudaStream_t current() const noexcept { return current_; }
    cudaStream_t enter(int round) {
        cudaStream_t const next = stream_of(round);
        if (next != current_) {
            OrderEvent const left;
            left.record(current_);
            left.order(next);
        }
        return current_ = next;
    }

private:
    [[nodiscard]] cudaStream_t stream_of(int round) const {
        std::array<cudaStream_t, 3> const all{nullptr, blocking_.get(), non_blocking_};
        bool const changes = caller_ == Caller::changing;
        return all
            [changes ? static_cast<std::size_t>(round) % 3 : static_cast<std::size_t>(caller_)];
    }

    Caller caller_;
    std::shared_ptr<CUstream_st> blocking_;
    Stream non_blocking_{};
    cudaStream_t current_ = nullptr;
};

/// A training of which every gradient is known.
struct Training {
    Caller caller = Caller::non_blocking;
    bool packs_apart = false;
    bool views = false;
    bool has_weights = false;
    bool finds_unused = false;
    bool has_guard = true;    ///< and rank r has r + 1 inputs; else all have 3
    bool has_threads = false; ///< each round is another thread's
    bool compares = false;    ///< the values of ranks, in each round
};

[[nodiscard]] inline std::string describe(Training const& training, int ranks) {
    return std::to_string(ranks) + " ranks, " +
           (training.has_guard ? "uneven inputs" : "no guard") + ", " + name_of(training.caller) +
           (training.packs_apart ? ", packed on the communicator's stream" : "") +
           (training.views ? ", bucket views" : ", copies") +
           (training.has_weights ? ", weights" : "") +
           (training.finds_unused ? ", unused parameters" : "") +
           (training.has_threads ? ", from worker threads" : "") +
           (training.compares ? ", values compared" : "");
}

/// What gradients of a training are: the numbers of number_of() times a factor. All factors are exact
/// in 16 bits for 1, 2 and 4 ranks.
struct Formula {
    Training training;
    int ranks;

    static constexpr float marker = 9; ///< times the numbers: what nobody may touch

    [[nodiscard]] int rounds_of(int rank) const { return training.has_guard ? rank + 1 : 3; }
    /// Of four parameters one is used by nobody, and one by the last rank alone.
    [[nodiscard]] bool uses(int rank, std::size_t parameter) const {
        return !training.finds_unused || parameter == 0 || parameter == 3 ||
               (parameter == 2 && rank == ranks - 1);
    }
    [[nodiscard]] static float own(int rank, int round) {
        return static_cast<float>((rank + 1) * (round + 1));
    }
    /// The sum of those of the last ranks is a power of two.
    [[nodiscard]] std::uint64_t weight(int rank) const {
        return rank == ranks - 1 ? 1 : std::uint64_t{1} << static_cast<unsigned>(ranks - 2 - rank);
    }
    [[nodiscard]] float average(int round, std::size_t parameter) const {
        float sum = 0;
        float weights = 0;
        bool is_used = false;
        for (int active = training.has_guard ? round : 0; active < ranks; ++active) {
            auto const w = training.has_weights ? static_cast<float>(weight(active)) : 1.0F;
            weights += w;
            if (uses(active, parameter)) {
                sum += w * own(active, round);
                is_used = true;
            }
        }
        return !is_used ? marker
                        : sum / (training.has_weights ? weights : static_cast<float>(ranks));
    }
};

/// Arrays of the numbers times a factor for each round and parameter, on the current device.
template <class T>
[[nodiscard]] std::vector<DeviceArray<T>>
numbers_times(float factor, std::vector<std::size_t> const& counts) {
    std::vector<DeviceArray<T>> arrays;
    for (std::size_t const count : counts) {
        std::vector<T> values;
        for (std::size_t e = 0; e < count; ++e) {
            values.push_back(T{factor * number_of(e)});
        }
        arrays.emplace_back(std::move(values), nullptr);
    }
    cuda(cudaStreamSynchronize(nullptr));
    return arrays;
}

inline void copy_on_device(void* to, void const* from, std::size_t bytes, cudaStream_t stream) {
    cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
}

/// An engine that copies known gradients into place, and reads gradients by copying them away.
template <class T>
class KnownEngine {
public:
    KnownEngine(Machine const& machine, Formula const& formula, int rank, int device)
        : machine_{machine}, formula_{formula}, rank_{rank}, device_{device},
          counts_{3000, 1, machine.large, 129} {
        for (std::size_t const count : counts_) {
            params.emplace_back(joinable::dtype_of<T>, count, device);
        }
        for (int round = 0; round < formula.rounds_of(rank); ++round) {
            written_.push_back(numbers_times<T>(Formula::own(rank, round), counts_));
            seen_.push_back(numbers_times<T>(0, counts_));
        }
        auto const marked = numbers_times<T>(Formula::marker, counts_);
        for (std::size_t p = 0; p < params.size(); ++p) {
            copy_on_device(params[p].grad.data(), marked[p].buffer().data, bytes(p), nullptr);
        }
        cuda(cudaStreamSynchronize(nullptr));
    }

    [[nodiscard]] std::vector<std::size_t> unused() const {
        std::vector<std::size_t> list;
        for (std::size_t p = 0; p < params.size(); ++p) {
            if (!formula_.uses(rank_, p)) {
                list.push_back(p);
            }
        }
        return list;
    }
    template <class Ready>
    void backward(int round, cudaStream_t stream, Ready const& ready) {
        for (std::size_t p = params.size(); p-- > 0;) {
            if (formula_.uses(rank_, p)) {
                void* const grad = params[p].grad.data();
                constexpr int poison = 0x4b; // such numbers are not small
                cuda(cudaMemsetAsync(grad, poison, bytes(p), stream));
                spin(stream);
                copy_on_device(grad, written_[at(round)][p].buffer().data, bytes(p), stream);
                ready(p);
            }
        }
    }
    /// The step: values become the gradients. Before, each rank has others.
    void step(int round, cudaStream_t stream) {
        for (std::size_t p = 0; p < params.size(); ++p) {
            cuda(cudaMemsetAsync(params[p].value.data(), 1 + rank_, bytes(p), stream));
        }
        spin(stream);
        for (std::size_t p = 0; p < params.size(); ++p) {
            void const* const grad = params[p].grad.data();
            copy_on_device(params[p].value.data(), grad, bytes(p), stream);
            copy_on_device(seen_[at(round)][p].buffer().data, grad, bytes(p), stream);
        }
    }

    /// What step() has read in every round, and what is there at the end.
    void expect_all(PinnedCommunicator& comm, cudaStream_t stream, bool keeps_gradients) {
        int const mine = formula_.rounds_of(rank_) - 1;
        int const last = formula_.rounds_of(formula_.ranks - 1) - 1;
        for (std::size_t p = 0; p < params.size(); ++p) {
            for (int round = 0; round <= mine; ++round) {
                auto const what = "the gradient after round " + std::to_string(round);
                expect_numbers(
                    seen_[at(round)][p].read(comm, stream), what, p, formula_.average(round, p)
                );
            }
            bool is_used = false;
            for (int rank = 0; rank < formula_.ranks; ++rank) {
                is_used = is_used || formula_.uses(rank, p);
            }
            bool const is_zeroed = mine != last && (!keeps_gradients || !is_used);
            float const factor = formula_.average(last, p);
            expect_numbers(
                read(params[p].grad, comm, stream),
                "the gradient at the end",
                p,
                is_zeroed ? 0 : factor
            );
            expect_numbers(read(params[p].value, comm, stream), "the value at the end", p, factor);
        }
    }

    std::vector<Param> params;

private:
    static std::size_t at(int round) { return static_cast<std::size_t>(round); }
    [[nodiscard]] std::size_t bytes(std::size_t p) const { return counts_[p] * sizeof(T); }
    void spin(cudaStream_t stream) const {
        joinable::detail::CurrentCudaDevice const current{device_};
        machine_.spin(stream);
    }
    static std::vector<T>
    read(joinable::AnyView const& view, PinnedCommunicator& comm, cudaStream_t stream) {
        DeviceArray<T> const copy{view.numel()};
        copy_on_device(copy.buffer().data, view.data(), view.numel() * sizeof(T), stream);
        return copy.read(comm, stream);
    }
    void expect_numbers(
        std::vector<T> const& values, std::string const& what, std::size_t p, float factor
    ) const {
        for (std::size_t e = 0; e < values.size(); ++e) {
            auto const found = static_cast<float>(values[e]);
            if (found != factor * number_of(e)) {
                expect(
                    false,
                    describe(formula_.training, formula_.ranks) + ": on rank " +
                        std::to_string(rank_) + " element " + std::to_string(e) + " of parameter " +
                        std::to_string(p) + ", " + what + ", is " + std::to_string(found) +
                        ", not " + std::to_string(factor * number_of(e))
                );
            }
        }
    }

    Machine const& machine_;
    Formula formula_;
    int rank_;
    int device_;
    std::vector<std::size_t> counts_;
    std::vector<std::vector<DeviceArray<T>>> written_; ///< per round and parameter
    std::vector<std::vector<DeviceArray<T>>> seen_;
};

/// Makes one of the GPUs this thread's, which ranks may share.
inline int share_device(ThreadHosts const& hosts) {
    int gpus = 0;
    cuda(cudaGetDeviceCount(&gpus));
    cuda(cudaSetDevice(hosts.rank() % gpus));
    return hosts.rank() % gpus;
}

[[nodiscard]] inline PinnedOptions
pinned_options(Machine const& machine, cudaStream_t caller, bool packs_apart) {
    return {
        .kernels = machine.kernels,
        .caller = caller,
        .packs_apart = packs_apart,
        .spin = machine.spin,
    };
}

/// Gradients are averaged in the order of the caller's streams, also those of joined ranks.
template <class T>
void check_training(ThreadHosts& hosts, Machine const& machine, Training const& training) {
    Formula const formula{training, hosts.size()};
    int const device = share_device(hosts);
    CallerStreams streams{training.caller};
    PinnedCommunicator comm{
        hosts, pinned_options(machine, streams.current(), training.packs_apart)
    };
    KnownEngine<T> engine{machine, formula, hosts.rank(), device};
    bool const keeps_gradients = training.views || training.finds_unused;
    joinable::DistributedDataParallel ddp{
        comm,
        engine.params,
        {.bucket_cap_bytes = 8192,
         .first_bucket_bytes = 1024,
         .gradient_as_bucket_view = training.views,
         .find_unused = training.finds_unused,
         .joined_gradients = keeps_gradients ? joinable::JoinedGradients::kept
                                             : joinable::JoinedGradients::zeroed_at_end,
         .verify_replicas = training.compares ? std::size_t{1} : 0}
    };
    std::optional<joinable::Join<decltype(ddp)>> guard;
    if (training.has_guard) {
        guard.emplace(joinable::participants(ddp), joinable::control(hosts));
    }
    auto const iterate = [&](int round) {
        cudaStream_t const stream = streams.enter(round);
        comm.set_stream(stream);
        if (training.has_weights) {
            ddp.forward([] {}, {.weight = formula.weight(hosts.rank())});
        } else {
            ddp.forward([] {});
        }
        ddp.backward([&](auto ready) { engine.backward(round, stream, ready); }, engine.unused());
        engine.step(round, stream);
    };
    for (int round = 0; round < formula.rounds_of(hosts.rank()); ++round) {
        if (training.has_threads) {
            std::async(std::launch::async, iterate, round).get();
        } else {
            iterate(round);
        }
    }
    if (guard) {
        auto const rounds = guard->finish().rounds;
        expect(
            rounds == static_cast<std::size_t>(hosts.size()),
            "a guard counts " + std::to_string(rounds) + " rounds of " +
                std::to_string(hosts.size())
        );
    }
    engine.expect_all(comm, streams.current(), keeps_gradients);
}

/// What an engine over host memory or over a GPU does in check_sharded_order().
template <class T>
using Values = std::vector<std::vector<T>>; ///< per parameter

/// Sharded training with clipped gradients has the values of one on the host, bit for bit, in every
/// round: a step is read by the next forward pass.
template <class T>
void check_sharded_order(
    ThreadHosts& hosts,
    Machine const& machine,
    Caller caller,
    bool packs_apart,
    joinable::Sharding sharding
) {
    int const device = share_device(hosts);
    CallerStreams streams{caller};
    cudaStream_t const stream = streams.current();
    PinnedCommunicator comm{hosts, pinned_options(machine, stream, packs_apart)};
    std::vector<std::size_t> const counts{3000, 1, machine.large, 129};
    joinable::ShardedOptions options{.sharding = sharding, .bucket_cap_bytes = 8192};
    joinable::ClipNorm clip{1.0};
    options.before_step = std::ref(clip);
    std::vector<HostParam<T>> on_host;
    std::vector<Param> params;
    std::vector<std::vector<DeviceArray<T>>> written; // per round and parameter
    std::vector<std::vector<DeviceArray<T>>> seen;
    for (std::size_t const count : counts) {
        on_host.push_back({std::vector<T>(count), std::vector<T>(count)});
        params.emplace_back(joinable::dtype_of<T>, count, device);
    }
    std::vector<Values<T>> expected; // per round
    auto const note_host = [&] {
        expected.emplace_back();
        for (HostParam<T> const& param : on_host) {
            expected.back().push_back(param.value);
        }
    };
    train_sharded(hosts, hosts, on_host, options, [&](int round, auto ready) {
        note_host();
        for (std::size_t p = on_host.size(); p-- > 0;) {
            for (std::size_t e = 0; e < counts[p]; ++e) {
                on_host[p].grad[e] = T{Formula::own(hosts.rank(), round) * number_of(e)};
            }
            ready(p);
        }
    });
    note_host();
    double const norm = clip.norm();
    for (int round = 0; round <= hosts.rank(); ++round) {
        written.push_back(numbers_times<T>(Formula::own(hosts.rank(), round), counts));
        seen.push_back(numbers_times<T>(0, counts));
    }
    seen.push_back(numbers_times<T>(0, counts));
    auto const read_values = [&](std::size_t round) {
        machine.spin(stream);
        for (std::size_t p = 0; p < counts.size(); ++p) {
            copy_on_device(
                seen[round][p].buffer().data, params[p].value.data(), counts[p] * sizeof(T), stream
            );
        }
    };
    train_sharded(comm, hosts, params, options, [&](int round, auto ready) {
        auto const now = static_cast<std::size_t>(round);
        read_values(now);
        for (std::size_t p = params.size(); p-- > 0;) {
            machine.spin(stream);
            copy_on_device(
                params[p].grad.data(), written[now][p].buffer().data, counts[p] * sizeof(T), stream
            );
            ready(p);
        }
    });
    read_values(seen.size() - 1);
    std::string const who = std::to_string(hosts.size()) + " ranks, sharded, stage " +
                            std::to_string(static_cast<int>(sharding)) + ", " + name_of(caller) +
                            ": on rank " + std::to_string(hosts.rank()) + " ";
    expect(
        norm > 1.0 && clip.norm() == norm,
        who + "the norm is " + std::to_string(clip.norm()) + ", not " + std::to_string(norm)
    );
    for (std::size_t round = 0; round < seen.size(); ++round) {
        for (std::size_t p = 0; p < counts.size(); ++p) {
            std::vector<T> const values = seen[round][p].read(comm, stream);
            for (std::size_t e = 0; e < counts[p]; ++e) {
                auto const found = static_cast<float>(values[e]);
                auto const due = static_cast<float>(expected[round][p][e]);
                if (found != due) {
                    expect(
                        false,
                        who + "element " + std::to_string(e) + " of value " + std::to_string(p) +
                            " after " + std::to_string(round) + " steps is " +
                            std::to_string(found) + ", not " + std::to_string(due)
                    );
                }
            }
        }
    }
}

/// All of it; rank 0 prints a line for each thing that is shown.
inline void check_order(ThreadHosts& hosts, Machine const& machine) {
    auto const done = [&](std::string const& what) {
        hosts.barrier();
        if (hosts.rank() == 0) {
            std::printf("%s: ok\n", what.c_str());
        }
    };
    auto const train = [&](Training training) {
        for (bool const views : {false, true}) {
            training.views = views;
            check_training<float>(hosts, machine, training);
            done(describe(training, hosts.size()));
        }
    };
    for (Caller const caller :
         {Caller::null, Caller::blocking, Caller::non_blocking, Caller::changing}) {
        for (bool const packs_apart : {false, true}) {
            train({.caller = caller, .packs_apart = packs_apart});
        }
    }
    check_training<joinable::BFloat16>(hosts, machine, {});
    done(describe({}, hosts.size()) + ", bf16");
    train({.has_threads = true});
    for (Caller const caller : {Caller::null, Caller::blocking, Caller::non_blocking}) {
        for (bool const packs_apart : {false, true}) {
            train({.caller = caller, .packs_apart = packs_apart, .compares = true});
        }
    }
    for (Caller const caller : {Caller::null, Caller::non_blocking}) {
        for (bool const has_guard : {true, false}) {
            train({.caller = caller, .has_weights = true, .has_guard = has_guard});
            train({.caller = caller, .finds_unused = true, .has_guard = has_guard});
        }
    }
    train({.packs_apart = true, .has_weights = true, .finds_unused = true, .has_threads = true});
    for (joinable::Sharding const sharding :
         {joinable::Sharding::optimizer, joinable::Sharding::gradients}) {
        for (Caller const caller : {Caller::null, Caller::blocking, Caller::non_blocking}) {
            for (bool const packs_apart : {false, true}) {
                check_sharded_order<float>(hosts, machine, caller, packs_apart, sharding);
            }
            done(
                std::to_string(hosts.size()) + " ranks, sharded, stage " +
                std::to_string(static_cast<int>(sharding)) + ", clipped, " + name_of(caller)
            );
        }
    }
}

} // namespace joinable_gpu
