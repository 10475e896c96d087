// SPDX-License-Identifier: BSL-1.0
// A small network in double, its data, and its training in one process: what examples have in
// common that split a network over ranks, and compare themselves with that training.
#pragma once

#include <joinable/join.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <random>
#include <span>
#include <vector>

namespace examples {

/// Rows are samples: `samples` x `width`, row-major.
using Matrix = std::vector<double>;

/// A linear layer without a bias. With its members `value` and `grad` it is a parameter.
struct Layer {
    std::size_t inputs;
    std::size_t outputs;
    Matrix value; ///< outputs x inputs
    Matrix grad = Matrix(value.size());

    [[nodiscard]] Matrix forward(Matrix const& x) const {
        std::size_t const samples = x.size() / inputs;
        Matrix y(samples * outputs);
        for (std::size_t n = 0; n < samples; ++n) {
            for (std::size_t o = 0; o < outputs; ++o) {
                for (std::size_t i = 0; i < inputs; ++i) {
                    y[n * outputs + o] += value[o * inputs + i] * x[n * inputs + i];
                }
            }
        }
        return y;
    }
    /// Adds to `grad`. Returns the gradient of the inputs.
    [[nodiscard]] Matrix backward(Matrix const& x, Matrix const& dy) {
        std::size_t const samples = x.size() / inputs;
        Matrix dx(x.size());
        for (std::size_t n = 0; n < samples; ++n) {
            for (std::size_t o = 0; o < outputs; ++o) {
                for (std::size_t i = 0; i < inputs; ++i) {
                    grad[o * inputs + i] += dy[n * outputs + o] * x[n * inputs + i];
                    dx[n * inputs + i] += dy[n * outputs + o] * value[o * inputs + i];
                }
            }
        }
        return dx;
    }
    void step(double rate) {
        for (std::size_t i = 0; i < value.size(); ++i) {
            value[i] -= rate * grad[i];
        }
        std::fill(grad.begin(), grad.end(), 0.0);
    }
};

inline void apply_tanh(Matrix& y) {
    for (double& number : y) {
        number = std::tanh(number);
    }
}

/// Turns the gradient of y = tanh(x) into that of x.
inline void undo_tanh(Matrix const& y, Matrix& dy) {
    for (std::size_t i = 0; i < y.size(); ++i) {
        dy[i] *= 1 - y[i] * y[i];
    }
}

/// A number of [-1, 1) that is the same on all systems.
inline double uniform(std::mt19937& random) {
    return static_cast<double>(random()) / 0x1p31 - 1.0;
}

inline constexpr std::size_t features = 6;
inline constexpr std::size_t targets = 2;
inline constexpr int epochs = 10;
inline constexpr double rate = 0.2;

/// The network: there is a tanh after each layer but the last.
inline std::vector<Layer> make_layers(std::size_t hidden = 24) {
    std::array<std::size_t, 5> const widths{features, hidden, 6, hidden, targets};
    std::mt19937 random{1};
    std::vector<Layer> layers;
    for (std::size_t k = 0; k + 1 < widths.size(); ++k) {
        Matrix value(widths[k] * widths[k + 1]);
        std::generate(value.begin(), value.end(), [&] {
            return uniform(random) / std::sqrt(static_cast<double>(widths[k]) / 3);
        });
        layers.push_back({widths[k], widths[k + 1], value});
    }
    return layers;
}

struct Batch {
    Matrix inputs;
    Matrix targets;

    [[nodiscard]] std::size_t samples() const { return inputs.size() / features; }
};

/// Shard d has 8 + 4 d batches of 5 to 8 samples.
inline std::vector<Batch> make_shard(int d) {
    std::mt19937 random{static_cast<std::mt19937::result_type>(100 + d)};
    auto const shard = static_cast<std::size_t>(d);
    std::vector<Batch> batches(8 + 4 * shard);
    for (std::size_t b = 0; b < batches.size(); ++b) {
        for (std::size_t n = 0; n < 5 + (b + shard) % 4; ++n) {
            std::array<double, features> x{};
            std::generate(x.begin(), x.end(), [&] { return uniform(random); });
            batches[b].inputs.insert(batches[b].inputs.end(), x.begin(), x.end());
            batches[b].targets.push_back(std::sin(x[0] + x[1]));
            batches[b].targets.push_back(x[2] * x[3] - x[4]);
        }
    }
    return batches;
}

/// The gradient of half the squared errors, divided by `samples`.
inline Matrix loss_gradient(Matrix const& y, Matrix const& target, std::size_t samples) {
    Matrix dy(y.size());
    for (std::size_t i = 0; i < y.size(); ++i) {
        dy[i] = (y[i] - target[i]) / static_cast<double>(samples);
    }
    return dy;
}

/// The inputs of each layer, and the output of the last one.
inline std::vector<Matrix> forward(std::vector<Layer> const& layers, Matrix const& inputs) {
    std::vector<Matrix> activations{inputs};
    for (std::size_t k = 0; k < layers.size(); ++k) {
        activations.push_back(layers[k].forward(activations.back()));
        if (k + 1 < layers.size()) {
            apply_tanh(activations.back());
        }
    }
    return activations;
}

/// Adds the gradient of each layer to its `grad` and then calls `ready(k)`, the last layer first.
/// `d` is the gradient of the output. Returns that of the inputs.
template <class Ready>
Matrix backward(
    std::vector<Layer>& layers, std::vector<Matrix> const& activations, Matrix d, Ready const& ready
) {
    for (std::size_t k = layers.size(); k-- > 0;) {
        d = layers[k].backward(activations[k], d);
        ready(k);
        if (k > 0) {
            undo_tanh(activations[k], d);
        }
    }
    return d;
}

/// The mean of the squared errors over shards 0 to `shards` - 1.
inline double loss(std::vector<Layer> const& layers, int shards) {
    double sum = 0;
    std::size_t samples = 0;
    for (int d = 0; d < shards; ++d) {
        for (Batch const& batch : make_shard(d)) {
            Matrix const y = forward(layers, batch.inputs).back();
            for (std::size_t i = 0; i < y.size(); ++i) {
                sum += (y[i] - batch.targets[i]) * (y[i] - batch.targets[i]);
            }
            samples += batch.samples();
        }
    }
    return sum / static_cast<double>(samples);
}

/// Trains the network in one process. A round has the next batch of each shard that has one left,
/// and averages over all their samples.
inline std::vector<Layer> train_alone(int shards) {
    std::vector<Layer> layers = make_layers();
    std::vector<std::vector<Batch>> batches;
    for (int d = 0; d < shards; ++d) {
        batches.push_back(make_shard(d));
    }
    std::size_t const rounds = batches.back().size();
    for (std::size_t round = 0; round < rounds * epochs; ++round) {
        std::vector<Batch const*> present;
        std::size_t samples = 0;
        for (std::vector<Batch> const& shard : batches) {
            if (round % rounds < shard.size()) {
                present.push_back(&shard[round % rounds]);
                samples += present.back()->samples();
            }
        }
        for (Batch const* batch : present) {
            std::vector<Matrix> const activations = forward(layers, batch->inputs);
            (void)backward(
                layers,
                activations,
                loss_gradient(activations.back(), batch->targets, samples),
                [](std::size_t) {}
            );
        }
        for (Layer& layer : layers) {
            layer.step(rate);
        }
    }
    return layers;
}

/// The largest difference between the values of two networks, or parts of them.
inline double difference(std::vector<Layer> const& a, std::vector<Layer> const& b) {
    double largest = 0;
    for (std::size_t k = 0; k < a.size(); ++k) {
        for (std::size_t i = 0; i < a[k].value.size(); ++i) {
            largest = std::max(largest, std::abs(a[k].value[i] - b.at(k).value.at(i)));
        }
    }
    return largest;
}

/// How a rank has trained its part of the network.
struct Outcome {
    std::size_t own_rounds = 0;
    std::size_t shadow_rounds = 0;
    double difference = 0; ///< of its values from those of train_alone()

    void add(joinable::JoinResult const& result) {
        own_rounds += result.own_rounds;
        shadow_rounds += result.shadow_rounds;
    }
};

/// Prints what each rank has done. Ranks are ordered by shard, then by `part`.
/// @return whether all ranks have the values of `alone`, the training in one process
inline bool report(
    std::span<Outcome const> outcomes, int shards, char const* part, std::vector<Layer> const& alone
) {
    std::fprintf(stderr, "\r               \r");
    std::size_t const parts = outcomes.size() / static_cast<std::size_t>(shards);
    double largest = 0;
    for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
        Outcome const& outcome = outcomes[rank];
        largest = std::max(largest, outcome.difference);
        std::printf("rank %zu, shard %zu, %s %zu: ", rank, rank / parts, part, rank % parts);
        std::printf("%zu rounds, %zu shadowed\n", outcome.own_rounds, outcome.shadow_rounds);
    }
    double const before = loss(make_layers(), shards);
    std::printf("in one process: loss %.4f before, %.4f after\n", before, loss(alone, shards));
    bool const is_same = largest < 1e-12;
    std::printf("the ranks have the same values, to within 1e-12: %s\n", is_same ? "yes" : "NO");
    return is_same;
}

} // namespace examples
