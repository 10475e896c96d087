// SPDX-License-Identifier: BSL-1.0
// Trains a network of dlib over ranks whose shards differ in length, and for comparison lets dlib's
// own trainer train one alone on the union of their batches. Both end with the same values, up to
// rounding.
#include <joinable/join.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <random>
#include <vector>

#include <CLI/CLI.hpp>
#include <dlib/dnn.h>

// ---- dlib's tensors and parameters for joinable

template <>
struct joinable::tensor_traits<dlib::tensor> {
    using value_type = float;
    static float* data(dlib::tensor& t) { return t.host(); }
    static float const* data(dlib::tensor const& t) { return t.host(); }
    static std::array<long long, 4> extents(dlib::tensor const& t) {
        return {t.num_samples(), t.k(), t.nr(), t.nc()};
    }
};

/// What a layer of dlib learns: all its numbers are in one tensor.
struct LayerParameters {
    dlib::tensor* value;
    dlib::tensor* grad;
};

template <>
struct joinable::parameter_traits<LayerParameters> {
    static constexpr bool is_handle = true; // a copy refers to the same tensors
    static dlib::tensor* value(LayerParameters const& p) { return p.value; }
    static dlib::tensor* grad(LayerParameters const& p) { return p.grad; }
};

namespace {

/// The parameters of a network that has done a backward pass; before, it has none.
template <class Net>
std::vector<LayerParameters> parameters_of(Net& net) {
    std::vector<LayerParameters> parameters;
    dlib::visit_layer_parameters(net, [&](std::size_t, dlib::tensor& t) {
        parameters.push_back({&t, nullptr});
    });
    dlib::visit_layer_parameter_gradients(net, [&](std::size_t i, dlib::tensor& t) {
        parameters[i].grad = &t;
    });
    std::erase_if(parameters, [](LayerParameters const& p) { return p.value->size() == 0; });
    return parameters;
}

// ---- the training

using Sample = dlib::matrix<float, 2, 1>;
using Hidden = dlib::htan<dlib::fc<24, dlib::input<Sample>>>;
using Network = dlib::loss_multiclass_log<dlib::fc<3, dlib::htan<dlib::fc<24, Hidden>>>>;

struct Options {
    int ranks = 4;
    int epochs = 5;
};

constexpr std::size_t samples = 6000;
constexpr std::size_t batch_size = 32;
constexpr double rate = 0.1;
dlib::sgd const solver{0.0005F, 0.9F}; // weight decay and momentum

struct Batch {
    std::vector<Sample> points;
    std::vector<unsigned long> arms;

    [[nodiscard]] std::size_t size() const { return points.size(); }
    void append(Batch const& other) {
        points.insert(points.end(), other.points.begin(), other.points.end());
        arms.insert(arms.end(), other.arms.begin(), other.arms.end());
    }
    [[nodiscard]] Batch part(std::size_t begin, std::size_t count) const {
        auto const cut = [&](auto const& all) {
            auto const from = all.begin() + static_cast<std::ptrdiff_t>(begin);
            return std::vector(from, from + static_cast<std::ptrdiff_t>(count));
        };
        return {cut(points), cut(arms)};
    }
};

/// Points on the three arms of a spiral.
Batch make_spiral() {
    std::mt19937 random{1};
    std::uniform_real_distribution<float> uniform{0, 1};
    Batch data;
    for (std::size_t i = 0; i < samples; ++i) {
        auto const arm = static_cast<unsigned long>(random() % 3);
        float const distance = uniform(random);
        float const angle = 4 * distance + 2.0944F * static_cast<float>(arm) + uniform(random) / 2;
        data.points.push_back({distance * std::cos(angle), distance * std::sin(angle)});
        data.arms.push_back(arm);
    }
    return data;
}

/// Rank r gets r + 1 shares of the samples, in batches; the last batch may be short.
std::vector<std::vector<Batch>> deal(Batch const& data, int ranks) {
    std::vector<std::vector<Batch>> shards(static_cast<std::size_t>(ranks));
    std::size_t const shares = shards.size() * (shards.size() + 1) / 2;
    std::size_t begin = 0;
    for (std::size_t rank = 0; rank < shards.size(); ++rank) {
        std::size_t const end = data.size() * (rank + 1) * (rank + 2) / 2 / shares;
        for (; begin < end; begin += batch_size) {
            shards[rank].push_back(data.part(begin, std::min(batch_size, end - begin)));
        }
        begin = end;
    }
    return shards;
}

double loss_on(Network& network, Batch const& data) {
    return network.compute_loss(data.points.begin(), data.points.end(), data.arms.begin());
}

/// Trains `network` on this rank's shard together with the other ranks. Returns a loss per epoch.
std::vector<double> train_together(
    joinable::ThreadCommunicator& comm,
    std::vector<Batch> const& shard,
    Batch const& data,
    int epochs,
    Network& network
) {
    std::vector<dlib::sgd> solvers(Network::num_computational_layers, solver);
    joinable::DistributedDataParallel ddp{comm, parameters_of(network)}; // all get rank 0's values
    joinable::Step step{comm, [&] { network.update_parameters(solvers, rate); }};
    std::size_t const count = parameters_of(network).size();
    std::vector<double> losses;
    for (int epoch = 0; epoch < epochs; ++epoch) {
        joinable::Join guard{joinable::participants(ddp, step)};
        for (Batch const& batch : shard) {
            // Weighted by samples, so that a short batch counts for less.
            ddp.forward([] {}, {.weight = batch.size()});
            ddp.backward([&](auto ready) {
                network.compute_parameter_gradients( // dlib runs both passes
                    batch.points.begin(),
                    batch.points.end(),
                    batch.arms.begin()
                );
                for (std::size_t i = 0; i < count; ++i) {
                    ready(i);
                }
            });
            step.step();
        }
        guard.finish(); // shadows until the last rank has run out
        losses.push_back(loss_on(network, data));
    }
    return losses;
}

/// dlib's trainer gets all batches of a round at once.
std::vector<double> train_alone(
    std::vector<std::vector<Batch>> const& shards, Batch const& data, int epochs, Network& network
) {
    dlib::dnn_trainer<Network> trainer{network, solver};
    trainer.set_learning_rate(rate);
    trainer.set_iterations_without_progress_threshold(1'000'000); // keeps the rate
    std::vector<double> losses;
    for (int epoch = 0; epoch < epochs; ++epoch) {
        for (std::size_t round = 0; round < shards.back().size(); ++round) {
            Batch all;
            for (std::vector<Batch> const& shard : shards) {
                if (round < shard.size()) {
                    all.append(shard[round]);
                }
            }
            trainer.train_one_step(all.points, all.arms);
        }
        losses.push_back(loss_on(trainer.get_net(), data)); // waits for the trainer's thread
    }
    return losses;
}

/// The largest difference between two values.
double distance(Network& one, Network& other) {
    double distance = 0;
    auto const others = parameters_of(other);
    for (std::size_t i = 0; LayerParameters const& p : parameters_of(one)) {
        dlib::matrix<float> const difference = dlib::mat(*p.value) - dlib::mat(*others[i++].value);
        distance = std::max<double>(distance, dlib::max(dlib::abs(difference)));
    }
    return distance;
}

} // namespace

int main(int argc, char** argv) {
    Options options;
    CLI::App app{"Trains a network of dlib over thread ranks with uneven shards, and alone."};
    app.add_option("--ranks", options.ranks, "How many ranks, 1 to 64. Default: 4.")
        ->check(CLI::Range(1, 64))
        ->option_text("N");
    app.add_option("--epochs", options.epochs, "Passes over the samples. Default: 5.")
        ->check(CLI::Range(1, 1000))
        ->option_text("N");
    CLI11_PARSE(app, argc, argv);
    try {
        Batch const data = make_spiral();
        auto const shards = deal(data, options.ranks);
        std::vector<Network> networks(shards.size());
        for (std::size_t rank = 0; rank < shards.size(); ++rank) {
            std::printf("rank %zu has %zu batches\n", rank, shards[rank].size());
            networks[rank].compute_parameter_gradients( // makes its parameters
                data.points.begin(),
                data.points.begin() + 1,
                data.arms.begin()
            );
        }
        Network single = networks[0];
        std::vector<std::vector<double>> losses(shards.size());
        joinable::run_threads(options.ranks, [&](joinable::ThreadCommunicator& comm) {
            auto const rank = static_cast<std::size_t>(comm.rank());
            losses[rank] = train_together(comm, shards[rank], data, options.epochs, networks[rank]);
        });
        std::vector<double> const alone = train_alone(shards, data, options.epochs, single);
        std::printf("epoch  loss of %2d ranks  loss alone\n", options.ranks);
        for (std::size_t epoch = 0; epoch < alone.size(); ++epoch) {
            std::printf("%5zu %17.6f %11.6f\n", epoch + 1, losses[0][epoch], alone[epoch]);
        }
        double greatest = 0;
        for (Network& network : networks) {
            greatest = std::max(greatest, distance(network, single));
        }
        std::printf("values of any rank differ from those alone by at most %.0e\n", greatest);
        return greatest < 1e-3 ? 0 : 1;
    } catch (std::exception const& error) {
        std::fprintf(stderr, "train_dlib: %s\n", error.what());
        return 1;
    }
}
