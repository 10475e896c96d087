// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include <support/linear_model.hpp>

namespace joinable_tests {

/// A net with a normalisation layer whose means and variances are those of the samples of all ranks: it
/// sums over ranks in its forward pass and in its backward pass. On one rank that sums over nobody it is the
/// reference of one that does.
class NormalizedNet {
public:
    static constexpr std::size_t features = 2;
    using Row = std::array<double, features>;
    using Sum = std::function<void(std::span<double>)>;

    explicit NormalizedNet(Sum sum)
        : params{make_params<double>({features, features, features}, 1.0)}, sum_{std::move(sum)} {
        params[0].value = {0.75, -1.25};
    }

    /// The loss of these samples: half the sum of squares of outputs less targets. `uses` is how often the
    /// layer is used, once or twice.
    double forward(std::vector<Row> const& samples, std::size_t uses) {
        samples_ = samples;
        uses_ = uses;
        model_collectives_.clear();
        for (Row const& x : samples) {
            model_collectives_.push_back({});
            for (std::size_t c = 0; c < features; ++c) {
                model_collectives_.back()[c] = params[0].value[c] * x[c] + x[c] * x[c];
            }
        }
        first_ = normalize(model_collectives_);
        outputs_ = output_of(first_);
        if (uses == 2) {
            std::vector<Row> again = model_collectives_;
            for (std::size_t s = 0; s < again.size(); ++s) {
                for (std::size_t c = 0; c < features; ++c) {
                    again[s][c] += outputs_[s][c] * outputs_[s][c];
                }
            }
            first_outputs_ = outputs_;
            second_ = normalize(again);
            outputs_ = output_of(second_);
        }
        double loss = 0;
        for (std::size_t s = 0; s < samples.size(); ++s) {
            for (std::size_t c = 0; c < features; ++c) {
                outputs_[s][c] -= target(samples[s], c);
                loss += outputs_[s][c] * outputs_[s][c] / 2;
            }
        }
        return loss;
    }

    /// Adds to the gradients. `ready(i)` says that one is final.
    template <class Ready>
    void backward(Ready const& ready) {
        std::vector<Row> from = outputs_;
        std::vector<Row> to_hidden(from.size());
        if (uses_ == 2) {
            to_hidden = backward_of(second_, from);
            for (std::size_t s = 0; s < from.size(); ++s) {
                for (std::size_t c = 0; c < features; ++c) {
                    from[s][c] = to_hidden[s][c] * 2 * first_outputs_[s][c];
                }
            }
        }
        std::vector<Row> const rest = backward_of(first_, from);
        ready(1);
        ready(2);
        for (std::size_t s = 0; s < rest.size(); ++s) {
            for (std::size_t c = 0; c < features; ++c) {
                params[0].g(c) += (rest[s][c] + to_hidden[s][c]) * samples_[s][c];
            }
        }
        ready(0);
    }

    void step(double rate) {
        for (auto& param : params) {
            for (std::size_t c = 0; c < features; ++c) {
                param.value[c] -= rate * param.g(c);
                param.g(c) = 0;
            }
        }
    }

    std::vector<Param<double>> params; ///< factors, and the layer's weights and biases
    std::vector<double> running_mean = std::vector<double>(features, 0.0);
    std::vector<double> running_variance = std::vector<double>(features, 1.0);
    bool updates_running = true;

private:
    struct Normalized {
        std::vector<Row> values;
        Row scale{};
        double count = 0;
    };

    static double target(Row const& x, std::size_t c) { return 0.5 * x[c] - 0.25 * x[1 - c]; }

    Normalized normalize(std::vector<Row> const& inputs) {
        std::array<double, 1 + features> sums{static_cast<double>(inputs.size())};
        for (Row const& row : inputs) {
            for (std::size_t c = 0; c < features; ++c) {
                sums[1 + c] += row[c];
            }
        }
        sum_(sums);
        Normalized result{inputs, {}, sums[0]};
        Row squares{};
        for (Row& row : result.values) {
            for (std::size_t c = 0; c < features; ++c) {
                row[c] -= sums[1 + c] / sums[0];
                squares[c] += row[c] * row[c];
            }
        }
        sum_(squares);
        for (std::size_t c = 0; c < features; ++c) {
            double const variance = squares[c] / sums[0];
            result.scale[c] = 1 / std::sqrt(variance + 0.125);
            if (updates_running) {
                running_mean[c] += 0.25 * (sums[1 + c] / sums[0] - running_mean[c]);
                running_variance[c] += 0.25 * (variance - running_variance[c]);
            }
        }
        for (Row& row : result.values) {
            for (std::size_t c = 0; c < features; ++c) {
                row[c] *= result.scale[c];
            }
        }
        return result;
    }
    [[nodiscard]] std::vector<Row> output_of(Normalized const& normalized) const {
        std::vector<Row> outputs = normalized.values;
        for (Row& row : outputs) {
            for (std::size_t c = 0; c < features; ++c) {
                row[c] = row[c] * params[1].value[c] + params[2].value[c];
            }
        }
        return outputs;
    }
    std::vector<Row> backward_of(Normalized const& normalized, std::vector<Row> gradients) {
        std::array<double, 2 * features> sums{};
        for (std::size_t s = 0; s < gradients.size(); ++s) {
            for (std::size_t c = 0; c < features; ++c) {
                sums[c] += gradients[s][c];
                sums[features + c] += gradients[s][c] * normalized.values[s][c];
            }
        }
        for (std::size_t c = 0; c < features; ++c) { // of this rank: the gradients are summed later
            params[1].g(c) += sums[features + c];
            params[2].g(c) += sums[c];
        }
        sum_(sums);
        for (std::size_t s = 0; s < gradients.size(); ++s) {
            for (std::size_t c = 0; c < features; ++c) {
                double const x = normalized.values[s][c];
                double& gradient = gradients[s][c];
                gradient -= (sums[c] + x * sums[features + c]) / normalized.count;
                gradient *= params[1].value[c] * normalized.scale[c];
            }
        }
        return gradients;
    }

    Sum sum_;
    std::vector<Row> samples_;
    std::vector<Row> model_collectives_;
    std::vector<Row> outputs_;
    std::vector<Row> first_outputs_;
    Normalized first_;
    Normalized second_;
    std::size_t uses_ = 1;
};

} // namespace joinable_tests
