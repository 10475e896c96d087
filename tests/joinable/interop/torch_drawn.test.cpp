// SPDX-License-Identifier: BSL-1.0
// Trainings of libtorch modules, drawn from seeds: whatever the layers, the ranks' inputs and the options, each rank's
// gradients and values are those of one module in double that computes all batches itself, by torch::autograd::grad().
// JOINABLE_TEST_SEEDS="first count" runs others than the usual 60, such as "0 300".
#include <joinable/interop/torch.hpp>

#include <torch/torch.h> // before doctest: both have a macro CHECK

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <support/draw.hpp>
#include <support/ranks.hpp>

#include <joinable/join/guard.hpp>

namespace {

using joinable::ThreadCommunicator;
using joinable_tests::Draw;
using joinable_tests::run_ranks;
using torch::Tensor;

enum class Part {
    linear,
    norm,
    conv,
    recurrent,
    scale,
    frozen,
    tied,
    branch,
    unused,
    counter,
    embedding,
    bag
};
enum class Average { over_all, over_contributors, of_weighted_means, of_weighted_sums };
enum class Optimizer { sgd, momentum, adam, adagrad };
enum class Call { module, lambda, loss };

struct DrawnBatch {
    std::int64_t samples = 0;
    unsigned branches = 0; ///< a bit for each part
    int number = 0;        ///< of its data
    bool is_skipped = false;

    [[nodiscard]] Tensor numbers(std::int64_t columns, double shift) const {
        auto const all = torch::arange(samples * columns, torch::kDouble) * 0.7 + number * 1.3;
        return torch::sin(all + shift).reshape({samples, columns});
    }
    [[nodiscard]] Tensor indices() const {
        return (torch::arange(samples, torch::kLong) * 3 + number).remainder(7);
    }
};
struct DrawnRound {
    bool evaluates = false, begins_window = false, syncs = false;
    std::vector<DrawnBatch> batches; ///< of the ranks that have not joined
};
struct DrawnEpoch {
    std::vector<std::size_t> counts; ///< rounds of each rank
    std::vector<DrawnRound>
        rounds; ///< each with a batch for every rank, which those that have joined leave
};

struct DrawnTraining {
    explicit DrawnTraining(std::uint64_t seed) {
        Draw draw{seed};
        world = draw.one_of({1, 2, 2, 3, 3, 4, 4, 8});
        width = static_cast<std::int64_t>(draw.between(2, 4));
        for (std::size_t i = draw.between(1, 6); i > 0; --i) {
            parts.push_back(static_cast<Part>(draw.below(12)));
        }
        bool const is_sparse = has(Part::embedding) || has(Part::bag);
        optimizer = is_sparse
                        ? Optimizer::sgd // libtorch 1.13's Adagrad throws for no rows
                        : draw.one_of({Optimizer::momentum, Optimizer::adam, Optimizer::adagrad});
        average = static_cast<Average>(draw.below(4));
        bool const accumulates =
            average == Average::over_all || average == Average::of_weighted_sums;
        std::size_t const sync_every = accumulates ? draw.between(1, 3) : 1;
        bool const skips = average != Average::over_contributors && draw.one_in(3);
        bool const evaluates = draw.one_in(4);
        finds_unused = has(Part::branch) || has(Part::unused) || draw.one_in(3);
        has_static_graph = !has(Part::branch) && !skips && draw.one_in(4);
        views = draw.one_in(2);
        to_none = draw.one_in(2);
        starts_apart = draw.one_in(2);
        first_bucket_bytes = draw.one_of<std::size_t>({1, 64, 200, 1U << 20U});
        rebuilds = draw.one_in(2);
        verifies = draw.one_in(6);
        call = static_cast<Call>(draw.below(3));
        reports_backward = draw.one_in(2);
        int number = 0;
        for (std::size_t e = draw.between(1, 2); e > 0; --e) {
            DrawnEpoch epoch;
            for (int rank = 0; rank < world; ++rank) {
                epoch.counts.push_back(draw.below(6));
            }
            std::size_t const length = *std::max_element(epoch.counts.begin(), epoch.counts.end());
            std::size_t in_window = 0;
            for (std::size_t i = 0; i < length; ++i) {
                DrawnRound& round = epoch.rounds.emplace_back();
                round.evaluates = evaluates && i + 1 < length && draw.one_in(4);
                if (!round.evaluates) {
                    round.begins_window = in_window == 0;
                    round.syncs = ++in_window == sync_every || i + 1 == length;
                    in_window = round.syncs ? 0 : in_window;
                }
                for (int rank = 0; rank < world; ++rank) {
                    round.batches.push_back(
                        {static_cast<std::int64_t>(draw.between(1, 3)),
                         static_cast<unsigned>(draw.below(64)),
                         ++number,
                         skips && !round.evaluates && draw.one_in(4)}
                    );
                }
            }
            epochs.push_back(std::move(epoch));
        }
    }
    [[nodiscard]] bool has(Part part) const {
        return std::find(parts.begin(), parts.end(), part) != parts.end();
    }
    [[nodiscard]] bool sums() const { return average == Average::of_weighted_sums; }
    [[nodiscard]] bool is_weighted() const { return average >= Average::of_weighted_means; }

    int world = 0;
    std::int64_t width = 0;
    std::vector<Part> parts;
    Optimizer optimizer{};
    Average average{};
    Call call{};
    bool finds_unused = false, has_static_graph = false, views = false, to_none = false,
         starts_apart = false;
    bool rebuilds = false, verifies = false, reports_backward = false;
    std::size_t first_bucket_bytes = 0;
    std::vector<DrawnEpoch> epochs;
};

/// The module of a training. The one of the serial training has no gradients that are rows.
struct DrawnNetImpl : torch::nn::Module {
    DrawnNetImpl(DrawnTraining const& training, bool has_rows) : training_{training} {
        std::int64_t const width = training.width;
        std::shared_ptr<torch::nn::LinearImpl> last_linear;
        for (std::size_t i = 0; i < training.parts.size(); ++i) {
            std::string const name = "part" + std::to_string(i);
            torch::nn::AnyModule layer;
            switch (training.parts[i]) {
            case Part::norm:
                layer =
                    torch::nn::AnyModule{torch::nn::LayerNorm{torch::nn::LayerNormOptions{{width}}}
                    };
                break;
            case Part::conv:
                layer = torch::nn::AnyModule{
                    torch::nn::Conv1d{torch::nn::Conv1dOptions{1, 1, 3}.padding(1)}
                };
                break;
            case Part::recurrent:
                layer = torch::nn::AnyModule{torch::nn::GRUCell{width, width}};
                break;
            case Part::embedding:
                layer = torch::nn::AnyModule{
                    torch::nn::Embedding{torch::nn::EmbeddingOptions{7, width}.sparse(has_rows)}
                };
                break;
            case Part::bag:
                layer = torch::nn::AnyModule{torch::nn::EmbeddingBag{
                    torch::nn::EmbeddingBagOptions{7, width}.mode(torch::kSum).sparse(has_rows)
                }};
                break;
            case Part::scale:
                register_parameter(name, torch::ones({}));
                register_parameter(name + "_shift", torch::ones({width}));
                break;
            case Part::counter: register_buffer(name, torch::zeros({2}, torch::kLong)); break;
            default:
                if (training.parts[i] != Part::tied || !last_linear) {
                    last_linear = torch::nn::Linear{width, width}.ptr();
                }
                layer = torch::nn::AnyModule{last_linear};
            }
            if (!layer.is_empty()) {
                register_module(name, layer.ptr());
            }
            layers_.push_back(std::move(layer));
        }
        head_ = register_module("head", torch::nn::Linear{width, 2});
        to(torch::kDouble);
        torch::NoGradGuard const no_graph;
        double shift = 0.5;
        for (Tensor& parameter : distinct()) {
            auto const flat =
                torch::arange(parameter.numel(), torch::kDouble) * 1.9 + (shift += 0.77);
            parameter.copy_(0.6 * torch::sin(flat).reshape(parameter.sizes()));
        }
        for (std::size_t i = 0; i < training.parts.size(); ++i) {
            if (training.parts[i] == Part::frozen) {
                for (Tensor& parameter : layers_[i].ptr()->parameters()) {
                    parameter.requires_grad_(false);
                }
            }
        }
    }

    Tensor forward(DrawnBatch const& batch) {
        Tensor x = batch.numbers(training_.width, 0);
        for (std::size_t i = 0; i < layers_.size(); ++i) {
            std::string const name = "part" + std::to_string(i);
            auto const linear = [&] { return torch::tanh(layers_[i].forward<Tensor>(x)); };
            switch (training_.parts[i]) {
            case Part::linear:
            case Part::frozen:
            case Part::tied: x = linear(); break;
            case Part::norm: x = layers_[i].forward<Tensor>(x); break;
            case Part::conv: x = x + layers_[i].forward<Tensor>(x.unsqueeze(1)).squeeze(1); break;
            case Part::recurrent: {
                Tensor const hidden = layers_[i].forward<Tensor>(x, torch::zeros_like(x));
                x = x + layers_[i].forward<Tensor>(x, hidden);
                break;
            }
            case Part::scale: // of one sample the shift's gradient is a view of the sum's
                x = x * named_parameters(false)[name];
                x = x + named_parameters(false)[name + "_shift"].unsqueeze(0);
                break;
            case Part::branch:
                if ((batch.branches >> i & 1U) != 0) {
                    x = x + linear();
                }
                break;
            case Part::unused: break;
            case Part::counter:
                if (torch::GradMode::is_enabled()) {
                    named_buffers(false)[name].add_(batch.samples);
                }
                break;
            case Part::embedding: x = x + layers_[i].forward<Tensor>(batch.indices()).tanh(); break;
            case Part::bag:
                x = x +
                    layers_[i]
                        .forward<Tensor>(
                            torch::stack({batch.indices(), batch.indices() / 2}, 1).to(torch::kLong)
                        )
                        .tanh();
            }
        }
        return head_->forward(x);
    }
    [[nodiscard]] Tensor loss(Tensor const& outputs, DrawnBatch const& batch) const {
        Tensor const sum = (outputs - batch.numbers(2, 1)).pow(2).sum();
        return training_.sums() ? sum : sum / batch.samples;
    }

    /// Each parameter once, those that are trained or all.
    [[nodiscard]] std::vector<Tensor> distinct(bool trained_only = false) const {
        std::vector<Tensor> all;
        std::unordered_set<void const*> seen;
        for (Tensor const& parameter : parameters()) {
            if (seen.insert(parameter.unsafeGetTensorImpl()).second &&
                (!trained_only || parameter.requires_grad())) {
                all.push_back(parameter);
            }
        }
        return all;
    }

private:
    DrawnTraining const& training_;
    std::vector<torch::nn::AnyModule> layers_;
    torch::nn::Linear head_{nullptr};
};
TORCH_MODULE(DrawnNet);

std::unique_ptr<torch::optim::Optimizer>
optimizer_of(DrawnTraining const& training, std::vector<Tensor> parameters) {
    switch (training.optimizer) {
    case Optimizer::adam:
        return std::make_unique<torch::optim::Adam>(
            std::move(parameters), torch::optim::AdamOptions{0.01}.eps(1e-6)
        );
    case Optimizer::adagrad:
        return std::make_unique<torch::optim::Adagrad>(
            std::move(parameters), torch::optim::AdagradOptions{0.05}.eps(1e-6)
        );
    default:
        return std::make_unique<torch::optim::SGD>(
            std::move(parameters),
            torch::optim::SGDOptions{0.05}.momentum(
                training.optimizer == Optimizer::momentum ? 0.9 : 0
            )
        );
    }
}

std::vector<Tensor> copies(std::vector<Tensor> const& tensors) {
    std::vector<Tensor> all;
    for (Tensor const& tensor : tensors) {
        all.push_back(tensor.defined() ? tensor.detach().clone() : Tensor{});
    }
    return all;
}
std::vector<Tensor> gradients(std::vector<Tensor> const& parameters) {
    std::vector<Tensor> all;
    for (Tensor const& parameter : parameters) {
        all.push_back(parameter.grad());
    }
    return all;
}

/// One module computes the batches of all ranks, and averages them by the definition.
struct SerialTraining {
    struct Expected {
        std::vector<Tensor> gradients; ///< of trained parameters, before the step
        std::vector<Tensor> values;    ///< of all, after it
    };
    explicit SerialTraining(DrawnTraining const& training) {
        DrawnNet model{training, false};
        auto const trained = model->distinct(true);
        auto const optimizer = optimizer_of(training, trained);
        std::vector<std::vector<Tensor>> held(static_cast<std::size_t>(training.world));
        counted.assign(held.size(), 0);
        for (DrawnEpoch const& epoch : training.epochs) {
            auto& rounds = expected.emplace_back();
            double weight = 0;
            for (std::size_t i = 0; i < epoch.rounds.size(); ++i) {
                DrawnRound const& round = epoch.rounds[i];
                rounds.emplace_back();
                if (round.evaluates) {
                    continue;
                }
                int contributors = 0;
                std::size_t lowest = held.size();
                for (std::size_t rank = 0; rank < held.size(); ++rank) {
                    DrawnBatch const& batch = round.batches[rank];
                    if (i >= epoch.counts[rank]) {
                        continue;
                    }
                    lowest = std::min(lowest, rank);
                    if (batch.is_skipped) {
                        continue;
                    }
                    ++contributors;
                    auto const samples = static_cast<double>(batch.samples);
                    counted[rank] += batch.samples;
                    weight += training.is_weighted() ? samples : 0;
                    auto const own = torch::autograd::grad(
                        {model->loss(model->forward(batch), batch)}, trained, {}, {}, false, true
                    );
                    held[rank].resize(trained.size());
                    for (std::size_t p = 0; p < own.size(); ++p) {
                        if (own[p].defined()) {
                            double const factor =
                                training.average == Average::of_weighted_means ? samples : 1;
                            Tensor& sum = held[rank][p];
                            sum = sum.defined() ? sum + factor * own[p] : factor * own[p];
                        }
                    }
                }
                if (!round.syncs) {
                    continue;
                }
                // A window of no batch, or whose weights sum to 0, averages to zeros. Else what no rank used
                // stays as it was.
                bool const is_empty = std::all_of(held.begin(), held.end(), [](auto const& one) {
                    return one.empty();
                });
                bool const finds_unused = !is_empty && training.finds_unused;
                double const divisor = is_empty                                ? 1
                                       : training.is_weighted()                ? weight
                                       : training.average == Average::over_all ? training.world
                                                                               : contributors;
                for (std::size_t p = 0; p < trained.size(); ++p) {
                    Tensor& average = trained[p].mutable_grad();
                    if (!finds_unused) {
                        average = torch::zeros_like(trained[p]);
                    } else if (training.to_none || !average.defined()) {
                        average.reset();
                    } else {
                        average.zero_();
                    }
                    for (auto const& of_rank : held) {
                        if (p < of_rank.size() && of_rank[p].defined()) {
                            Tensor const share = of_rank[p] / divisor;
                            average = average.defined() ? average + share : share;
                        }
                    }
                }
                held.assign(held.size(), {});
                weight = 0;
                rounds[i].gradients = copies(gradients(trained));
                optimizer->step();
                rounds[i].values = copies(model->distinct());
                std::fill(counted.begin(), counted.end(), counted[lowest]);
            }
        }
        last = copies(model->distinct());
    }

    std::vector<std::vector<Expected>> expected; ///< by epoch and round
    std::vector<Tensor> last;
    std::vector<std::int64_t> counted; ///< by each rank's counters, in the end
};

void require(bool is_true, std::string const& text) {
    if (!is_true) {
        throw std::runtime_error{text};
    }
}
void require_close(
    std::vector<Tensor> const& tensors,
    std::vector<Tensor> const& expected,
    std::string const& where
) {
    require(tensors.size() == expected.size(), where + ": another number of tensors");
    for (std::size_t i = 0; i < tensors.size(); ++i) {
        std::string const here = where + " of parameter " + std::to_string(i);
        require(
            tensors[i].defined() == expected[i].defined(),
            here + (tensors[i].defined() ? " is there" : " is missing")
        );
        if (tensors[i].defined()) {
            Tensor const dense = tensors[i].is_sparse() ? tensors[i].to_dense() : tensors[i];
            double const off = (dense.detach() - expected[i]).abs().max().item<double>();
            require(
                off <= 1e-9 * (1 + expected[i].abs().max().item<double>()),
                here + " is off by " + std::to_string(off)
            );
        }
    }
}

void train(ThreadCommunicator& comm, DrawnTraining const& training, SerialTraining const& serial) {
    auto const rank = static_cast<std::size_t>(comm.rank());
    DrawnNet model{training, true};
    if (rank != 0 && training.starts_apart) {
        torch::NoGradGuard const no_graph;
        for (Tensor& parameter : model->distinct()) {
            parameter.add_(1);
        }
        for (Tensor& buffer : model->buffers()) {
            buffer.add_(5);
        }
    }
    auto const trained = model->distinct(true);
    auto const optimizer = optimizer_of(training, trained);
    joinable::torch::DistributedDataParallel ddp{
        comm,
        model,
        {.first_bucket_bytes = training.first_bucket_bytes,
         .gradient_as_bucket_view = training.views,
         .find_unused = training.finds_unused,
         .static_graph = training.has_static_graph,
         .gradient_kind =
             training.sums() ? joinable::GradientKind::sum : joinable::GradientKind::mean,
         .rebuild_buckets = training.rebuilds,
         .sync_at_end = false, // so that each rank ends with what its own steps made of its values
         .verify_ready = training.verifies,
         .verify_replicas = training.verifies ? 1U : 0U}
    };
    joinable::torch::Step step{comm, *optimizer};
    for (std::size_t e = 0; e < training.epochs.size(); ++e) {
        joinable::Join guard{
            joinable::participants(ddp, step),
            joinable::divide_by_initial_world_size = training.average != Average::over_contributors
        };
        for (std::size_t i = 0; i < training.epochs[e].counts[rank]; ++i) {
            DrawnRound const& round = training.epochs[e].rounds[i];
            DrawnBatch const& batch = round.batches[rank];
            if (round.evaluates) {
                torch::NoGradGuard const no_graph;
                ddp.forward(batch);
                continue;
            }
            if (round.begins_window) {
                model->zero_grad(training.to_none);
            }
            joinable::RoundNotice notice{.will_sync = round.syncs};
            if (training.is_weighted()) {
                notice.weight = batch.is_skipped ? 0 : batch.samples;
            }
            if (batch.is_skipped) {
                ddp.skip(notice);
            } else {
                Tensor loss;
                if (training.call == Call::loss) {
                    loss = ddp.forward(
                        [&] { return model->loss(model->forward(batch), batch); }, notice
                    );
                } else if (training.call == Call::lambda) {
                    auto const [number, outputs] = ddp.forward(
                        [&] {
                            return std::pair{
                                batch.number, std::vector<Tensor>{model->forward(batch)}
                            };
                        },
                        notice
                    );
                    loss = model->loss(outputs[0], batch);
                } else {
                    loss = model->loss(ddp.forward(notice, batch), batch);
                }
                training.reports_backward ? ddp.backward(loss) : loss.backward();
            }
            if (round.syncs) {
                std::string const where = "epoch " + std::to_string(e) + ", round " +
                                          std::to_string(i) + ", rank " + std::to_string(rank);
                require_close(
                    gradients(trained), serial.expected[e][i].gradients, where + ": gradient"
                );
                step.step();
                require_close(model->distinct(), serial.expected[e][i].values, where + ": value");
            }
        }
        guard.finish();
    }
    require_close(
        model->distinct(), serial.last, "rank " + std::to_string(rank) + " in the end: value"
    );
    for (Tensor const& buffer : model->buffers()) {
        require(
            buffer.eq(serial.counted[rank]).all().item<bool>(),
            "rank " + std::to_string(rank) + ": a buffer counted " +
                std::to_string(buffer[0].item<int>())
        );
    }
}

TEST_CASE("any training of a libtorch module equals that of one module in double") {
    std::uint64_t first = 0;
    std::uint64_t count = 60;
    if (char const* const seeds = std::getenv("JOINABLE_TEST_SEEDS")) {
        std::istringstream{seeds} >> first >> count;
    }
    for (std::uint64_t seed = first; seed < first + count; ++seed) {
        std::string failed;
        try {
            DrawnTraining const training{seed};
            SerialTraining const serial{training};
            run_ranks({training.world}, [&](ThreadCommunicator& comm) {
                train(comm, training, serial);
            });
        } catch (std::exception const& error) {
            failed = error.what();
        }
        CHECK_MESSAGE(failed.empty(), "seed ", seed, ": ", failed);
    }
}

} // namespace
