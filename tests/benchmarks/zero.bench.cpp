// SPDX-License-Identifier: BSL-1.0
// A step of Adam on every rank: of the whole model by itself; sharded, with the exchange of parameters; and
// sharded with one broadcast for each parameter, as PyTorch's ZeroRedundancyOptimizer exchanges them. Beside them the
// time to read and write the bytes that each has to move at least. Then whole rounds: gradients are averaged, too.
// zero_torch.py measures PyTorch's own.
#include <benchmark/benchmark.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/zero.hpp>

#include "weights.hpp"

namespace {

using joinable_benchmarks::MovableWeights;
using joinable_benchmarks::Weights;
using Clock = std::chrono::steady_clock;
constexpr int steps = 4;

/// A model of `megabytes` of f32: large matrices, a vector beside each. A narrow one has only vectors of as many
/// elements.
template <class W>
std::vector<W> model_of(std::int64_t megabytes, bool is_narrow) {
    std::vector<W> model;
    for (std::int64_t i = 0; i < megabytes; ++i) {
        for (std::size_t k = 0; is_narrow && k < 512; ++k) {
            model.emplace_back(std::size_t{512}, 0.5F);
        }
        if (!is_narrow) {
            model.emplace_back(std::size_t{1} << 18U, 0.5F);
        }
        model.emplace_back(std::size_t{512}, 0.5F);
    }
    for (W& weights : model) {
        weights.storage.assign(weights.storage.size(), 0.25F);
    }
    return model;
}

enum class Ranks { threads, processes };

/// Seconds of a step: of the slowest rank, the mean of some after one to warm up.
template <class W = Weights, Ranks ranks = Ranks::threads, class Make>
void measure(benchmark::State& state, Make const& make, bool is_narrow = false) {
    auto const seconds = joinable::shared_buffer<double>(1);
    for (auto _ : state) {
        auto const run = [&](auto& comm) {
            auto model = model_of<W>(state.range(1), is_narrow);
            auto step = make(comm, model);
            step();
            comm.barrier();
            auto const start = Clock::now();
            for (int i = 0; i < steps; ++i) {
                step();
            }
            comm.barrier();
            if (comm.rank() == 0) {
                seconds[0] = std::chrono::duration<double>(Clock::now() - start).count() / steps;
            }
        };
        auto const size = static_cast<int>(state.range(0));
        if constexpr (ranks == Ranks::threads) {
            joinable::run_threads(size, run);
        } else {
            joinable::run_processes(size, run);
        }
        state.SetIterationTime(seconds[0]);
    }
    double const parameters = static_cast<double>(state.range(1)) * ((1U << 18U) + 512);
    state.counters["parameters"] = parameters;
}

/// A step as every rank does it where nothing is sharded.
class WholeAdam {
public:
    explicit WholeAdam(std::vector<Weights>& model) : model_{model} {
        for (Weights const& weights : model) {
            first_.emplace_back(weights.value.size());
            second_.emplace_back(weights.value.size());
        }
    }
    void step(std::size_t i, std::uint64_t number) {
        float* const state[] = {first_[i].data(), second_[i].data()};
        joinable::UpdateRange<float> const range{
            model_[i].value.size(), model_[i].value.data(), model_[i].storage.data(), state, number
        };
        joinable::Adam{}.update(range);
    }

private:
    std::vector<Weights>& model_;
    std::vector<std::vector<float>> first_;
    std::vector<std::vector<float>> second_;
};

void whole(benchmark::State& state) {
    measure(state, [](auto&, auto& model) {
        return [adam = WholeAdam{model}, &model, number = std::uint64_t{0}]() mutable {
            ++number;
            for (std::size_t i = 0; i < model.size(); ++i) {
                adam.step(i, number);
            }
        };
    });
}

template <
    joinable::Partition partition,
    class W = Weights,
    bool is_narrow = false,
    Ranks ranks = Ranks::threads>
void sharded(benchmark::State& state) {
    auto const make = [](auto& comm, auto& model) {
        using Zero = joinable::
            ZeroRedundancyOptimizer<std::remove_reference_t<decltype(comm)>, joinable::Adam>;
        joinable::ZeroOptions const options{
            .partition = partition,
            .parameters_as_bucket_view = std::is_same_v<W, MovableWeights>,
        };
        auto zero = std::make_unique<Zero>(comm, model, joinable::Adam{}, options);
        return [zero = std::move(zero)] { zero->step(); };
    };
    measure<W, ranks>(state, make, is_narrow);
}

/// A round of a training whose passes only use values: gradients are averaged and stepped.
template <class W, class Passes, class Optimizer>
auto round_of(
    std::vector<W> const& model,
    std::unique_ptr<Passes> passes,
    std::unique_ptr<Optimizer> optimizer
) {
    return [&model, passes = std::move(passes), optimizer = std::move(optimizer)] {
        auto const forward = [&](auto const&... use) {
            for (std::size_t i = 0; i < model.size(); ++i) {
                (static_cast<void>(use(i)), ...);
            }
        };
        auto const backward = [&](auto ready, auto const&... use) {
            for (std::size_t i = model.size(); i-- > 0;) {
                (static_cast<void>(use(i)), ...);
                ready(i);
            }
        };
        passes->forward(forward);
        passes->backward(backward);
        if constexpr (std::is_same_v<Optimizer, std::nullptr_t>) {
            passes->step();
        } else {
            optimizer->step();
        }
    };
}

void round_beside_a_model(benchmark::State& state) {
    measure(state, [](auto& comm, auto& model) {
        using Comm = std::remove_reference_t<decltype(comm)>;
        using Zero = joinable::ZeroRedundancyOptimizer<Comm, joinable::Adam>;
        return round_of(
            model,
            std::make_unique<joinable::DistributedDataParallel<Comm>>(comm, model),
            std::make_unique<Zero>(comm, model, joinable::Adam{})
        );
    });
}

/// With sharded values, a matrix and its vector are a unit.
template <joinable::Sharding sharding, class W = Weights>
void round_sharded(benchmark::State& state) {
    measure<W>(state, [](auto& comm, auto& model) {
        using Comm = std::remove_reference_t<decltype(comm)>;
        using Sharded = joinable::ShardedDataParallel<Comm, joinable::Adam>;
        joinable::ShardedOptions options{.sharding = sharding};
        if constexpr (sharding == joinable::Sharding::parameters) {
            options.units.assign(model.size() / 2, 2);
        }
        return round_of(
            model,
            std::make_unique<Sharded>(comm, model, joinable::Adam{}, options),
            std::unique_ptr<std::nullptr_t>{}
        );
    });
}

void sharded_by_broadcasts(benchmark::State& state) {
    measure(state, [](auto& comm, auto& model) {
        std::vector<std::size_t> sizes;
        for (Weights const& weights : model) {
            sizes.push_back(weights.value.size());
        }
        std::vector<std::size_t> loads(static_cast<std::size_t>(comm.size()));
        auto owners = joinable::detail::owners_by_size(sizes, loads);
        return
            [adam = WholeAdam{model}, &model, &comm, owners, number = std::uint64_t{0}]() mutable {
                ++number;
                std::vector<joinable::work_of<joinable::ThreadCommunicator>> works;
                for (std::size_t i = 0; i < model.size(); ++i) {
                    if (owners[i] == comm.rank()) {
                        adam.step(i, number);
                    }
                }
                for (std::size_t i = 0; i < model.size(); ++i) {
                    works.push_back(joinable::broadcast(comm, model[i].value, owners[i]));
                    if (works.size() == 8) { // as many as may be on their way
                        for (auto& work : works) {
                            work.wait();
                        }
                        works.clear();
                    }
                }
                for (auto& work : works) {
                    work.wait();
                }
            };
    });
}

/// The least that a rank has to move: gradient and state of its share in, state and values out, and the values of
/// the others. It reads and writes as many words as a step does, in as many places at a time, and adds them: a
/// copy would read its target, too.
template <bool is_whole>
void limit(benchmark::State& state) {
    measure(state, [&](auto& comm, auto& model) {
        std::size_t const words = model.size() / 2 * ((std::size_t{1} << 18U) + 512) / 2;
        std::size_t const share = is_whole ? words : words / static_cast<std::size_t>(comm.size());
        using Words = std::vector<std::uint64_t>;
        return [gradient = Words(share, 1),
                first = Words(share, 1),
                second = Words(share, 1),
                value = Words(words, 1)]() mutable {
            for (std::size_t i = 0; i < gradient.size(); ++i) {
                first[i] += gradient[i];
                second[i] += gradient[i];
                value[i] += gradient[i];
            }
            for (std::size_t i = gradient.size(); i < value.size(); ++i) {
                value[i] += 1;
            }
            benchmark::DoNotOptimize(value.data());
            benchmark::ClobberMemory();
        };
    });
}

void with_sizes(benchmark::internal::Benchmark* benchmark) {
    benchmark->ArgNames({"ranks", "MB"})
        ->ArgsProduct({{1, 2, 4}, {25, 250}})
        ->UseManualTime()
        ->Iterations(1)
        ->Repetitions(5)
        ->ReportAggregatesOnly()
        ->Unit(benchmark::kMillisecond);
}
BENCHMARK(limit<true>)->Apply(with_sizes)->Name("limit_whole");
BENCHMARK(whole)->Apply(with_sizes);
BENCHMARK(limit<false>)->Apply(with_sizes)->Name("limit_sharded");
BENCHMARK(sharded<joinable::Partition::by_parameters>)
    ->Apply(with_sizes)
    ->Name("sharded_by_parameters");
BENCHMARK(sharded<joinable::Partition::flat>)->Apply(with_sizes)->Name("sharded_flat");
using joinable::Partition;
BENCHMARK(sharded<Partition::by_parameters, Weights, false, Ranks::processes>)
    ->Apply(with_sizes)
    ->Name("processes_by_parameters");
BENCHMARK(sharded<Partition::flat, Weights, false, Ranks::processes>)
    ->Apply(with_sizes)
    ->Name("processes_flat");
BENCHMARK(sharded<Partition::by_parameters, MovableWeights>)
    ->Apply(with_sizes)
    ->Name("sharded_by_parameters_in_buckets");
BENCHMARK(sharded<Partition::flat, MovableWeights>)
    ->Apply(with_sizes)
    ->Name("sharded_flat_in_buckets");
BENCHMARK(sharded<Partition::by_parameters, Weights, true>)
    ->Apply(with_sizes)
    ->Name("narrow_by_parameters");
BENCHMARK(sharded<Partition::by_parameters, MovableWeights, true>)
    ->Apply(with_sizes)
    ->Name("narrow_by_parameters_in_buckets");
BENCHMARK(sharded<Partition::flat, Weights, true>)->Apply(with_sizes)->Name("narrow_flat");
BENCHMARK(sharded<Partition::flat, MovableWeights, true>)
    ->Apply(with_sizes)
    ->Name("narrow_flat_in_buckets");
BENCHMARK(sharded_by_broadcasts)->Apply(with_sizes);
BENCHMARK(round_beside_a_model)->Apply(with_sizes);
BENCHMARK(round_sharded<joinable::Sharding::optimizer>)
    ->Apply(with_sizes)
    ->Name("round_sharded_optimizer");
BENCHMARK(round_sharded<joinable::Sharding::gradients>)
    ->Apply(with_sizes)
    ->Name("round_sharded_gradients");
BENCHMARK(round_sharded<joinable::Sharding::parameters, MovableWeights>)
    ->Apply(with_sizes)
    ->Name("round_sharded_parameters");

} // namespace
