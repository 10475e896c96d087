// SPDX-License-Identifier: BSL-1.0
// Trainings of libtorch modules in parts, drawn from seeds: whatever the tree of modules, what a pass holds and how long, the
// units, the ranks' inputs and the options, each loss and each value is that of one module in double that computes all
// batches itself, by torch::autograd::grad(). JOINABLE_TEST_SEEDS="first count" runs others than the usual 60.
#include <joinable/interop/torch_sharded.hpp>

#include <torch/torch.h> // before doctest: both have a macro CHECK

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <support/draw.hpp>
#include <support/ranks.hpp>
#include <support/torch_small_net.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/zero.hpp>

namespace {
namespace in_parts {

using joinable::ShardedOptions;
using joinable::Sharding;
using joinable::ThreadCommunicator;
using joinable_tests::Draw;
using joinable_tests::small_net::RunsBlockAgain;
using joinable_tests::small_net::ThrowsInBackward;
using torch::Tensor;

enum class Kind {
    group,
    linear,
    norm,
    conv,
    recurrent,
    scale,
    frozen,
    branch,
    unused,
    tied,
    output
};
/// How long a pass holds the values of a layer.
enum class Hold { in_scope, until_assigned, until_released, to_the_end };
enum class Average { over_all, over_contributors, of_weighted_means, of_weighted_sums };
enum class Failure { before, in_forward, in_backward, without_backward };

struct Part {
    Kind kind{};
    Hold hold{};
    bool is_held_whole = false; ///< a group, around its parts
    bool holds_again = false;   ///< within a group that is held whole
    bool runs_again = false;    ///< in the backward pass
    std::size_t number = 0;     ///< among all
    std::size_t same = 0;       ///< as which linear layer, if it is tied
    std::vector<Part> parts;
};
struct Batch {
    std::int64_t samples = 0;
    std::uint64_t bits = 0; ///< for each part whether it is used
    int number = 0;         ///< of its data
    std::optional<Failure> fails;

    [[nodiscard]] bool uses(std::size_t part) const { return (bits >> part % 64 & 1U) != 0; }
    [[nodiscard]] Tensor numbers(std::int64_t columns, double shift) const {
        auto const all = torch::arange(samples * columns, torch::kDouble) * 0.7 + number * 1.3;
        return torch::sin(all + shift).reshape({samples, columns});
    }
};
struct Round {
    bool evaluates = false, without_graph = false, begins_window = false, syncs = false;
    std::vector<Batch> batches; ///< of each rank
};
struct Epoch {
    std::vector<std::size_t> counts; ///< rounds of each rank
    std::vector<Round> rounds;
};

struct Training {
    explicit Training(std::uint64_t seed) {
        Draw draw{seed};
        world = draw.one_of({1, 2, 2, 3, 3, 4, 8});
        width = static_cast<std::int64_t>(draw.between(2, 4));
        holds_all = draw.one_in(8);
        draw_parts(draw, root, 0);
        average = static_cast<Average>(draw.below(4));
        bool const is_sum = average == Average::over_all || average == Average::of_weighted_sums;
        std::size_t const sync_every = is_sum && draw.one_in(2) ? draw.between(2, 3) : 1;
        bool const skips = average != Average::over_contributors && draw.one_in(3);
        bool const evaluates = draw.one_in(3);
        by_factory = draw.one_in(2);
        starts_apart = draw.one_in(2);
        options.sharding = draw.one_in(6) ? Sharding::gradients : Sharding::parameters;
        options.partition =
            draw.one_in(2) ? joinable::Partition::flat : joinable::Partition::by_parameters;
        options.bucket_cap_bytes = draw.one_of<std::size_t>({1, 150, 400, 1U << 20U});
        options.sync_at_end = false;
        options.gradient_kind = average == Average::of_weighted_sums ? joinable::GradientKind::sum
                                                                     : joinable::GradientKind::mean;
        has_units = options.sharding == Sharding::parameters && draw.one_in(2);
        unit_seed = draw.below(1000);
        options.step_in_backward = !by_factory && !skips && draw.one_in(4);
        if (by_factory) {
            options.partition = joinable::Partition::by_parameters;
        }
        max_norm = !options.step_in_backward && draw.one_in(3) ? 0.05 : 0;
        reports_backward = draw.one_in(2);
        returns_loss = draw.one_in(3);
        int number = 0;
        for (std::size_t e = draw.between(1, 2); e > 0; --e) {
            Epoch epoch;
            for (int rank = 0; rank < world; ++rank) {
                epoch.counts.push_back(draw.below(6));
            }
            std::size_t const length = *std::max_element(epoch.counts.begin(), epoch.counts.end());
            std::size_t in_window = 0;
            for (std::size_t i = 0; i < length; ++i) {
                Round& round = epoch.rounds.emplace_back();
                round.evaluates = evaluates && i + 1 < length && draw.one_in(4);
                round.without_graph = draw.one_in(2);
                if (!round.evaluates) {
                    round.begins_window = in_window == 0;
                    round.syncs = ++in_window == sync_every || i + 1 == length;
                    in_window = round.syncs ? 0 : in_window;
                }
                for (int rank = 0; rank < world; ++rank) {
                    Batch& batch = round.batches.emplace_back();
                    batch.samples = static_cast<std::int64_t>(draw.between(1, 3));
                    batch.bits = draw.below(std::size_t{1} << 30U);
                    batch.number = ++number;
                    if (skips && !round.evaluates && draw.one_in(4)) {
                        batch.fails =
                            sync_every == 1 ? static_cast<Failure>(draw.below(4)) : Failure::before;
                    }
                }
            }
            epochs.push_back(std::move(epoch));
        }
    }
    void draw_parts(Draw& draw, Part& group, std::size_t depth) {
        for (std::size_t k = draw.between(1, 4); k > 0; --k) {
            Part part;
            part.kind = static_cast<Kind>(draw.below(11));
            if (part.kind == Kind::group && depth == 2) {
                part.kind = Kind::linear;
            }
            if (part.kind == Kind::tied && linears.empty()) {
                part.kind = Kind::linear;
            }
            part.hold = static_cast<Hold>(draw.below(4));
            part.is_held_whole = draw.one_in(2);
            part.holds_again = draw.one_in(3);
            part.runs_again = part.kind == Kind::linear && draw.one_in(5);
            part.number = count++;
            if (part.kind == Kind::tied) {
                part.same = linears[draw.below(linears.size())];
                tied.insert(part.same);
            } else if (part.kind == Kind::linear) {
                linears.push_back(part.number);
            } else if (part.kind == Kind::group) {
                draw_parts(draw, part, depth + 1);
            }
            group.parts.push_back(std::move(part));
        }
    }
    [[nodiscard]] bool is_weighted() const { return average >= Average::of_weighted_means; }

    int world = 0;
    std::int64_t width = 0;
    Part root;
    std::size_t count = 0; ///< of parts
    std::vector<std::size_t> linears;
    std::unordered_set<std::size_t> tied; ///< linear layers that are used again
    Average average{};
    ShardedOptions options;
    bool holds_all = false; ///< over the whole pass
    bool by_factory = false, starts_apart = false, has_units = false, reports_backward = false,
         returns_loss = false;
    std::size_t unit_seed = 0;
    double max_norm = 0;
    std::vector<Epoch> epochs;
};

/// Keeps the values that `use` returns.
template <class Use>
struct Pass {
    using Held = decltype(std::declval<Use&>()(std::declval<torch::nn::Module const&>()));

    Use use;
    Batch const& batch;
    bool runs_again = false; ///< layers that are to run in the backward pass, do
    bool has_whole = false;  ///< a group around what runs now is held
    std::size_t fails_at = ~std::size_t{0};
    Held assigned{};
    std::vector<Held> kept = {};
    std::vector<Tensor> outputs = {};
};

struct ScaleImpl : torch::nn::Module {
    ScaleImpl() : scale{register_parameter("scale", torch::ones({}))} {}
    Tensor forward(Tensor const& x) { return x * scale; }
    Tensor scale;
};
TORCH_MODULE(Scale);

struct NetImpl : torch::nn::Module {
    explicit NetImpl(Training const& training) : training_{training}, layers_(training.count) {
        make(*this, training.root);
        head_ = register_module("head", torch::nn::Linear{training.width, 2});
        to(torch::kDouble);
        torch::NoGradGuard const no_graph;
        double shift = 0.5;
        for (Tensor& parameter : distinct(false)) {
            auto const flat =
                torch::arange(parameter.numel(), torch::kDouble) * 1.9 + (shift += 0.77);
            parameter.copy_(0.6 * torch::sin(flat).reshape(parameter.sizes()));
        }
    }

    /// All outputs; the first one is the head's.
    template <class Use>
    std::vector<Tensor> run(Pass<Use>& pass) {
        Tensor x = pass.batch.numbers(training_.width, 0);
        if (!training_.linears.empty() && torch::GradMode::is_enabled()) {
            x.requires_grad_(true); // for layers that run again
        }
        pass.outputs.emplace_back();
        std::optional<typename Pass<Use>::Held> all;
        if (training_.holds_all) {
            all.emplace(pass.use(*this));
        }
        x = run_group(pass, *this, training_.root, x);
        [[maybe_unused]] auto const held = pass.use(*head_.ptr());
        Tensor const last = head_->forward(x);
        pass.outputs[0] =
            pass.batch.fails == Failure::in_backward && pass.fails_at != ~std::size_t{0}
                ? ThrowsInBackward::apply(last)
                : last;
        return std::move(pass.outputs);
    }
    [[nodiscard]] Tensor loss(std::vector<Tensor> const& outputs, Batch const& batch) const {
        Tensor sum = batch.uses(0) || outputs.size() == 1
                         ? (outputs[0] - batch.numbers(2, 1)).pow(2).sum()
                         : torch::zeros({}, torch::kDouble);
        for (std::size_t k = 1; k < outputs.size(); ++k) {
            if (!batch.uses(0) || batch.uses(k)) {
                sum = sum + outputs[k].pow(2).sum();
            }
        }
        if (!sum.requires_grad()) { // of the inputs alone
            sum = sum + outputs[0].sum();
        }
        return training_.average == Average::of_weighted_sums
                   ? sum
                   : sum / static_cast<double>(batch.samples);
    }
    /// Each parameter once, those that are trained or all.
    [[nodiscard]] std::vector<Tensor> distinct(bool trained_only) const {
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
    void make(torch::nn::Module& into, Part const& group) {
        for (Part const& part : group.parts) {
            std::string const name = "part" + std::to_string(part.number);
            torch::nn::AnyModule& layer = layers_[part.number];
            std::int64_t const width = training_.width;
            switch (part.kind) {
            case Kind::group: {
                auto const inner = std::make_shared<torch::nn::Module>(name);
                groups_.emplace_back(part.number, inner);
                into.register_module(name, inner);
                make(*inner, part);
                continue;
            }
            case Kind::norm:
                layer =
                    torch::nn::AnyModule{torch::nn::LayerNorm{torch::nn::LayerNormOptions{{width}}}
                    };
                break;
            case Kind::conv:
                layer = torch::nn::AnyModule{
                    torch::nn::Conv1d{torch::nn::Conv1dOptions{1, 1, 3}.padding(1)}
                };
                break;
            case Kind::recurrent:
                layer = torch::nn::AnyModule{torch::nn::GRUCell{width, width}};
                break;
            case Kind::scale: layer = torch::nn::AnyModule{Scale{}}; break;
            case Kind::tied: layer = layers_[part.same]; break;
            case Kind::output: continue;
            default: layer = torch::nn::AnyModule{torch::nn::Linear{width, width}};
            }
            into.register_module(name, layer.ptr());
            if (part.kind == Kind::frozen) {
                for (Tensor& parameter : layer.ptr()->parameters()) {
                    parameter.requires_grad_(false);
                }
            }
        }
    }
    [[nodiscard]] torch::nn::Module& group_of(Part const& part) {
        auto const found = std::find_if(groups_.begin(), groups_.end(), [&](auto const& one) {
            return one.first == part.number;
        });
        return *found->second;
    }

    template <class Use>
    Tensor run_group(Pass<Use>& pass, torch::nn::Module& module, Part const& group, Tensor x) {
        std::optional<typename Pass<Use>::Held> whole;
        if (group.is_held_whole) {
            whole.emplace(pass.use(module));
        }
        bool const had_whole = std::exchange(pass.has_whole, pass.has_whole || group.is_held_whole);
        for (Part const& part : group.parts) {
            if (part.kind == Kind::group) {
                x = run_group(pass, group_of(part), part, x);
            } else if (part.kind == Kind::output) {
                pass.outputs.push_back(x);
            } else if (part.kind != Kind::unused &&
                       (part.kind != Kind::branch || pass.batch.uses(part.number))) {
                if (part.number >= pass.fails_at && pass.batch.fails == Failure::in_forward) {
                    throw std::domain_error{"a batch that fails"};
                }
                x = run_layer(pass, part, x);
            }
        }
        pass.has_whole = had_whole;
        return x;
    }
    template <class Use>
    Tensor run_layer(Pass<Use>& pass, Part const& part, Tensor const& x) {
        std::optional<typename Pass<Use>::Held> held;
        if (part.kind != Kind::tied && (!pass.has_whole || part.holds_again)) {
            Hold const hold = training_.tied.contains(part.number) ? Hold::to_the_end : part.hold;
            auto const use = [&] { return pass.use(*layers_[part.number].ptr()); };
            if (hold == Hold::until_assigned) {
                pass.assigned = use();
            } else if (hold == Hold::to_the_end) {
                pass.kept.push_back(use());
            } else {
                held.emplace(use());
            }
        } else if (training_.tied.contains(part.number)) {
            pass.kept.push_back(pass.use(*layers_[part.number].ptr()));
        }
        Tensor const result = apply(pass, part, x);
        if (held && part.hold == Hold::until_released) {
            if constexpr (requires { held->release(); }) {
                held->release();
            }
        }
        return result;
    }
    template <class Use>
    Tensor apply(Pass<Use> const& pass, Part const& part, Tensor const& x) {
        torch::nn::AnyModule& layer = layers_[part.number];
        switch (part.kind) {
        case Kind::norm: return layer.forward<Tensor>(x);
        case Kind::conv: return x + layer.forward<Tensor>(x.unsqueeze(1)).squeeze(1);
        case Kind::recurrent: {
            Tensor const hidden = layer.forward<Tensor>(x, torch::zeros_like(x));
            return x + layer.forward<Tensor>(x, hidden);
        }
        case Kind::scale: return layer.forward<Tensor>(x);
        case Kind::branch: return x + torch::tanh(layer.forward<Tensor>(x));
        default:
            if (pass.runs_again && part.runs_again && x.requires_grad() &&
                !training_.tied.contains(part.number)) {
                runs_.push_back(std::make_unique<RunsBlockAgain::Run>([layer](Tensor const& inputs
                                                                      ) mutable {
                    return torch::tanh(layer.forward<Tensor>(inputs));
                }));
                return RunsBlockAgain::apply(
                    x, static_cast<RunsBlockAgain::Run const*>(runs_.back().get())
                );
            }
            return torch::tanh(layer.forward<Tensor>(x));
        }
    }

    Training const& training_;
    std::vector<torch::nn::AnyModule> layers_; ///< by the numbers of parts
    std::vector<std::pair<std::size_t, std::shared_ptr<torch::nn::Module>>> groups_;
    std::vector<std::unique_ptr<RunsBlockAgain::Run>> runs_; ///< of all passes
    torch::nn::Linear head_{nullptr};
};
TORCH_MODULE(Net);

constexpr double rate = 0.02, epsilon = 1e-3, decay = 0.1;

auto const adam_w = [](std::vector<Tensor> parameters) {
    return torch::optim::AdamW{
        std::move(parameters), torch::optim::AdamWOptions{rate}.eps(epsilon).weight_decay(decay)
    };
};

/// One module computes the batches of all ranks, and averages them by the definition.
struct Serial {
    struct Epoch {
        std::vector<std::vector<double>>
            losses; ///< by rounds and ranks; of an evaluation the sum of the first output
        std::vector<Tensor> values; ///< at its end
    };
    explicit Serial(Training const& training) {
        Net model{training};
        auto const trained = model->distinct(true);
        auto optimizer = adam_w(trained);
        std::vector<std::vector<Tensor>> held(static_cast<std::size_t>(training.world));
        auto const run = [&](Batch const& batch) {
            auto const use = [](auto const&) { return 0; };
            Pass<decltype(use)> pass{use, batch};
            return model->run(pass);
        };
        for (in_parts::Epoch const& epoch : training.epochs) {
            Epoch& expected = epochs.emplace_back();
            double weight = 0;
            for (std::size_t i = 0; i < epoch.rounds.size(); ++i) {
                Round const& round = epoch.rounds[i];
                auto& losses = expected.losses.emplace_back(held.size());
                int contributors = 0;
                for (std::size_t rank = 0; rank < held.size(); ++rank) {
                    Batch const& batch = round.batches[rank];
                    if (i >= epoch.counts[rank]) {
                        continue;
                    }
                    if (round.evaluates) {
                        losses[rank] = run(batch)[0].sum().item<double>();
                        continue;
                    }
                    auto const samples = static_cast<double>(batch.samples);
                    if (batch.fails != Failure::before) {
                        ++contributors;
                        weight += training.is_weighted() ? samples : 0;
                    }
                    if (batch.fails) {
                        continue;
                    }
                    Tensor const loss = model->loss(run(batch), batch);
                    losses[rank] = loss.item<double>();
                    held[rank].resize(trained.size());
                    if (!loss.requires_grad()) {
                        continue;
                    }
                    auto const own = torch::autograd::grad({loss}, trained, {}, {}, false, true);
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
                double divisor = training.is_weighted()                  ? weight
                                 : training.average == Average::over_all ? training.world
                                                                         : contributors;
                divisor = divisor == 0 ? 1 : divisor;
                for (std::size_t p = 0; p < trained.size(); ++p) {
                    Tensor average = torch::zeros_like(trained[p]);
                    for (auto const& of_rank : held) {
                        if (p < of_rank.size() && of_rank[p].defined()) {
                            average = average + of_rank[p] / divisor;
                        }
                    }
                    trained[p].mutable_grad() = average;
                }
                held.assign(held.size(), {});
                weight = 0;
                if (training.max_norm != 0) {
                    torch::nn::utils::clip_grad_norm_(trained, training.max_norm);
                }
                optimizer.step();
            }
            for (Tensor const& value : model->distinct(false)) {
                expected.values.push_back(value.detach().clone());
            }
        }
    }

    std::vector<Epoch> epochs;
};

void require(bool is_true, std::string const& text) {
    if (!is_true) {
        throw std::runtime_error{text};
    }
}
void require_close(double number, double expected, std::string const& where) {
    require(
        std::abs(number - expected) <= 1e-9 * (1 + std::abs(expected)),
        where + " is " + std::to_string(number) + ", not " + std::to_string(expected)
    );
}

template <class Rule>
void train(
    ThreadCommunicator& comm, Training const& training, Serial const& serial, Rule const& rule
) {
    auto const rank = static_cast<std::size_t>(comm.rank());
    Net model{training};
    if (rank != 0 && training.starts_apart) {
        torch::NoGradGuard const no_graph;
        for (Tensor& parameter : model->distinct(false)) {
            parameter.add_(1);
        }
    }
    auto const trained = model->distinct(true);
    ShardedOptions options = training.options;
    if (training.has_units) {
        Draw draw{training.unit_seed};
        for (std::size_t left = model->distinct(false).size(); left > 0;
             left -= options.units.back()) {
            options.units.push_back(std::min(left, draw.between(1, 4)));
        }
    }
    joinable::torch::ShardedDataParallel sharded{comm, model, rule, options};
    auto const require_released = [&](std::string const& where) {
        for (std::size_t i = 0; options.sharding == Sharding::parameters && i < trained.size();
             ++i) {
            require(
                trained[i].storage().nbytes() == 0,
                where + ": value " + std::to_string(i) + " is there"
            );
        }
    };
    auto const use = [&](auto const& part) { return sharded.use(part); };
    for (std::size_t e = 0; e < training.epochs.size(); ++e) {
        joinable::Join guard{
            joinable::participants(sharded),
            joinable::divide_by_initial_world_size = training.average != Average::over_contributors
        };
        for (std::size_t i = 0; i < training.epochs[e].counts[rank]; ++i) {
            Round const& round = training.epochs[e].rounds[i];
            Batch const& batch = round.batches[rank];
            std::string const where = "epoch " + std::to_string(e) + ", round " +
                                      std::to_string(i) + ", rank " + std::to_string(rank);
            double const expected = serial.epochs[e].losses[i][rank];
            auto const run = [&](bool fails) {
                Pass<decltype(use)> pass{use, batch, true};
                if (fails) {
                    pass.fails_at = static_cast<std::size_t>(batch.number) % training.count;
                }
                auto outputs = model->run(pass);
                require(
                    !fails || batch.fails != Failure::in_forward, "no layer was left to fail at"
                );
                return outputs;
            };
            joinable::RoundNotice notice{.will_sync = round.syncs};
            if (round.evaluates) {
                notice.phase = joinable::Phase::evaluate;
                std::optional<torch::NoGradGuard> no_graph;
                if (round.without_graph) {
                    no_graph.emplace();
                }
                auto const outputs = sharded.forward([&] { return run(false); }, notice);
                require_close(
                    outputs[0].sum().template item<double>(), expected, where + ": output"
                );
                require_released(where);
                continue;
            }
            if (round.begins_window) {
                model->zero_grad();
            }
            if (training.is_weighted()) {
                notice.weight = batch.fails == Failure::before ? 0 : batch.samples;
            }
            if (batch.fails == Failure::before) {
                sharded.skip(notice);
            } else if (batch.fails) {
                try {
                    auto const outputs = sharded.forward([&] { return run(true); }, notice);
                    if (batch.fails == Failure::in_backward) {
                        outputs[0].sum().backward();
                    }
                } catch (std::exception const& error) {
                    require(
                        std::string{error.what()}.starts_with("a batch that ") ||
                            std::string{error.what()} == "no layer was left to fail at",
                        where + ": " + error.what()
                    );
                }
                sharded.skip();
            } else {
                Tensor loss;
                if (training.returns_loss) {
                    loss = sharded.forward([&] { return model->loss(run(false), batch); }, notice);
                } else {
                    loss = model->loss(sharded.forward([&] { return run(false); }, notice), batch);
                }
                require_close(loss.template item<double>(), expected, where + ": loss");
                training.reports_backward ? sharded.backward(loss) : loss.backward();
            }
            require_released(where);
            if (round.syncs) {
                if (training.max_norm != 0) {
                    sharded.clip_grad_norm_(training.max_norm);
                }
                sharded.step();
            }
        }
        guard.finish();
        auto const held = sharded.use_all();
        auto const values = model->distinct(false);
        for (std::size_t p = 0; p < values.size(); ++p) {
            Tensor const& expected = serial.epochs[e].values[p];
            double const off = (values[p].detach() - expected).abs().max().template item<double>();
            require(
                off <= 1e-9 * (1 + expected.abs().max().template item<double>()),
                "epoch " + std::to_string(e) + ", rank " + std::to_string(rank) + ": value " +
                    std::to_string(p) + " is off by " + std::to_string(off)
            );
        }
    }
}

} // namespace in_parts

TEST_CASE("any training of a libtorch module in parts equals that of one module in double") {
    std::uint64_t first = 0;
    std::uint64_t count = 60;
    if (char const* const seeds = std::getenv("JOINABLE_TEST_SEEDS")) {
        std::istringstream{seeds} >> first >> count;
    }
    for (std::uint64_t seed = first; seed < first + count; ++seed) {
        std::string failed;
        try {
            in_parts::Training const training{seed};
            in_parts::Serial const serial{training};
            joinable_tests::run_ranks({training.world}, [&](joinable::ThreadCommunicator& comm) {
                if (training.by_factory) {
                    in_parts::train(comm, training, serial, in_parts::adam_w);
                } else {
                    in_parts::train(
                        comm,
                        training,
                        serial,
                        joinable::AdamW{
                            .learning_rate = in_parts::rate,
                            .epsilon = in_parts::epsilon,
                            .weight_decay = in_parts::decay
                        }
                    );
                }
            });
        } catch (std::exception const& error) {
            failed = error.what();
        }
        CHECK_MESSAGE(failed.empty(), "seed ", seed, ": ", failed);
    }
}

} // namespace
