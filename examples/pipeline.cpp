// SPDX-License-Identifier: BSL-1.0
// Trains a network whose layers are dealt out over the stages of a pipeline, by several pipelines
// with different data. A batch is cut into micro-batches, which run in the order 1F1B: once a stage
// has begun as many as there are stages behind it, it runs one forward and one backward in turn.
// Only the first stage has data. It announces each batch to the stage behind it, and so on, and in
// the end that there is none. The ranks of a stage average gradients in a guard, because their
// shards are uneven. The result equals a training in one process.
#include "layers.hpp"
#include "rank_failure.hpp"

#include <joinable/join.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <exception>
#include <span>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

namespace {

using examples::Layer;
using examples::Matrix;

constexpr std::size_t micro_samples = 2; ///< of a micro-batch; the last one may have fewer

/// The messages between two stages.
enum Tag : int { announcement, activations, gradients };

/// What a stage receives from the stage before it: an activation and the target of each sample.
struct MicroBatch {
    Matrix inputs;
    Matrix targets;
};

/// One stage of a pipeline: some layers, and the messages to the stages beside it.
template <class Comm>
class Stage {
public:
    /// `group` has the stages of one pipeline in their order.
    Stage(Comm& group, std::vector<Layer>& layers) : group_{group}, layers_{layers} {}

    [[nodiscard]] bool is_first() const { return group_.rank() == 0; }
    [[nodiscard]] bool is_last() const { return group_.rank() == group_.size() - 1; }

    /// The samples of the next batch, of which the first stage knows and tells the others; 0: none.
    std::size_t announce(std::size_t samples_of_first) {
        std::uint64_t samples = samples_of_first;
        if (!is_first()) {
            joinable::receive(group_, std::span{&samples, 1}, before(), announcement).wait();
        }
        if (!is_last()) {
            joinable::send(group_, std::span{&samples, 1}, behind(), announcement).wait();
        }
        return static_cast<std::size_t>(samples);
    }

    /// Runs both passes of an announced batch. Only the first stage reads `batch`. Calls
    /// `ready(k)` when the gradient of layer k is final.
    template <class Ready>
    void run(std::size_t samples, examples::Batch const& batch, Ready const& ready) {
        std::size_t const micro_batches = (samples + micro_samples - 1) / micro_samples;
        std::size_t const stages_behind =
            static_cast<std::size_t>(group_.size() - 1 - group_.rank());
        std::size_t const warm_up = std::min(stages_behind, micro_batches);
        for (std::size_t m = 0; m < micro_batches + warm_up; ++m) {
            if (m < micro_batches) {
                run_forward(receive(m, samples, batch));
            }
            if (m >= warm_up) {
                bool const is_final = m + 1 == micro_batches + warm_up;
                run_backward(samples, [&](std::size_t k) {
                    if (is_final) {
                        ready(k);
                    }
                });
            }
        }
        for (Sent& sent : sent_) {
            sent.work.wait();
        }
        sent_.clear();
    }

private:
    using Work =
        decltype(joinable::send(std::declval<Comm&>(), std::declval<Matrix const&>(), 0, 0));

    struct Running {
        std::vector<Matrix> activations; ///< the inputs of each layer, and the output of the last
        Matrix targets;
    };
    /// A message and its memory, which it reads until the other stage has received it.
    struct Sent {
        Sent(Comm& group, Matrix what, int to, int tag)
            : memory{std::move(what)}, work{joinable::send(group, memory, to, tag)} {}

        Matrix memory;
        Work work;
    };

    [[nodiscard]] int before() const { return group_.rank() - 1; }
    [[nodiscard]] int behind() const { return group_.rank() + 1; }

    MicroBatch receive(std::size_t m, std::size_t samples, examples::Batch const& batch) {
        std::size_t const begin = m * micro_samples;
        std::size_t const count = std::min(micro_samples, samples - begin);
        std::size_t const width = layers_.front().inputs;
        if (is_first()) {
            auto const rows = [&](Matrix const& of, std::size_t columns) {
                auto const at = of.begin() + static_cast<std::ptrdiff_t>(begin * columns);
                return Matrix(at, at + static_cast<std::ptrdiff_t>(count * columns));
            };
            return {rows(batch.inputs, width), rows(batch.targets, examples::targets)};
        }
        Matrix both(count * (width + examples::targets));
        joinable::receive(group_, both, before(), activations).wait();
        auto const middle = both.begin() + static_cast<std::ptrdiff_t>(count * width);
        return {Matrix(both.begin(), middle), Matrix(middle, both.end())};
    }

    void run_forward(MicroBatch micro_batch) {
        std::vector<Matrix> found = examples::forward(layers_, micro_batch.inputs);
        if (!is_last()) {
            examples::apply_tanh(found.back());
            Matrix both = found.back();
            both.insert(both.end(), micro_batch.targets.begin(), micro_batch.targets.end());
            sent_.emplace_back(group_, std::move(both), behind(), activations);
        }
        running_.push_back({std::move(found), std::move(micro_batch.targets)});
    }

    /// Runs the backward pass of the oldest micro-batch that has run forward.
    template <class Ready>
    void run_backward(std::size_t samples, Ready const& ready) {
        Running const oldest = std::move(running_.front());
        running_.pop_front();
        Matrix const& outputs = oldest.activations.back();
        Matrix d(outputs.size());
        if (is_last()) {
            d = examples::loss_gradient(outputs, oldest.targets, samples);
        } else {
            joinable::receive(group_, d, behind(), gradients).wait();
            examples::undo_tanh(outputs, d);
        }
        d = examples::backward(layers_, oldest.activations, std::move(d), ready);
        if (!is_first()) {
            sent_.emplace_back(group_, std::move(d), before(), gradients);
        }
    }

    Comm& group_;
    std::vector<Layer>& layers_;
    std::deque<Running> running_; ///< micro-batches between their passes
    std::deque<Sent> sent_;
};

template <class Comm>
examples::Outcome train(
    Comm& comm, int stages, examples::RunOptions const& options, std::vector<Layer> const& alone
) {
    int const stage = comm.rank() % stages;
    int const shard = comm.rank() / stages;
    Comm pipeline = comm.split(shard, stage); // the same data, other layers
    Comm replicas = comm.split(stage, shard); // the same layers, other data
    auto const own_layers = [&](std::vector<Layer> const& all) {
        auto const count = static_cast<std::ptrdiff_t>(all.size()) / stages;
        return std::vector<Layer>(all.begin() + stage * count, all.begin() + (stage + 1) * count);
    };
    std::vector<Layer> layers = own_layers(examples::make_layers());
    Stage runner{pipeline, layers};
    std::vector<examples::Batch> batches;
    if (runner.is_first()) {
        batches = examples::make_shard(shard);
    }
    joinable::DistributedDataParallel ddp{replicas, layers};
    joinable::Step step{replicas, [&] {
                            for (Layer& layer : layers) {
                                layer.step(examples::rate);
                            }
                        }};
    examples::Outcome outcome;
    for (int epoch = 0; epoch < examples::epochs; ++epoch) {
        joinable::Join guard{joinable::participants(ddp, step)};
        for (std::size_t b = 0;; ++b) {
            if (epoch == 1 && b == 2) {
                examples::fail_if_asked(options, comm.rank());
            }
            examples::Batch const batch = b < batches.size() ? batches[b] : examples::Batch{};
            std::size_t const samples = runner.announce(batch.samples());
            if (samples == 0) {
                break;
            }
            ddp.forward([] {}, {.weight = samples}); // both passes run in backward()
            ddp.backward([&](auto ready) { runner.run(samples, batch, ready); });
            step.step();
        }
        outcome.add(guard.finish()); // stages of shorter shards shadow the others
        if (comm.rank() == 0) {
            std::fprintf(stderr, "\repoch %d of %d ", epoch + 1, examples::epochs);
        }
    }
    outcome.difference = examples::difference(layers, own_layers(alone));
    return outcome;
}

} // namespace

int main(int argc, char** argv) {
    int data = 2;
    int stages = 2;
    examples::RunOptions options;
    CLI::App app{"Trains a network whose layers are stages of pipelines, by uneven shards."};
    app.add_option("--data", data, "How many shards, 1 to 8. Default: 2.")
        ->check(CLI::Range(1, 8))
        ->option_text("N");
    app.add_option("--stages", stages, "How many stages a pipeline has: 1, 2 or 4. Default: 2.")
        ->check(CLI::IsMember{{1, 2, 4}})
        ->option_text("N");
    examples::add_run_options(app, options);
    CLI11_PARSE(app, argc, argv);
    try {
        std::vector<Layer> const alone = examples::train_alone(data);
        int const ranks = data * stages;
        auto const outcomes =
            joinable::shared_buffer<examples::Outcome>(static_cast<std::size_t>(ranks));
        bool const is_done = examples::run_ranks(ranks, options, [&](auto& comm) {
            outcomes[static_cast<std::size_t>(comm.rank())] = train(comm, stages, options, alone);
        });
        return is_done && examples::report(outcomes, data, "stage", alone) ? 0 : 1;
    } catch (std::exception const& error) {
        std::fprintf(stderr, "pipeline: %s\n", error.what());
        return 1;
    }
}

// Output:
// rank 0, shard 0, stage 0: 80 rounds, 40 shadowed
// rank 1, shard 0, stage 1: 80 rounds, 40 shadowed
// rank 2, shard 1, stage 0: 120 rounds, 0 shadowed
// rank 3, shard 1, stage 1: 120 rounds, 0 shadowed
// in one process: loss 1.8826 before, 0.1000 after
// the ranks have the same values, to within 1e-12: yes
