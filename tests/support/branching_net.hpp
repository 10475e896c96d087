// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <vector>

#include <support/linear_model.hpp>

namespace joinable_tests {

struct Sample {
    std::array<double, 2> input{};
    double target = 0;
    bool takes_right_head = false;
};

/// Two layers with two heads, of which each sample takes one, a bias, and a parameter that nothing
/// uses. Forward and backward by hand; optimizer SGD with momentum.
///
///     hidden = tanh(W x + b),  output = head . hidden + c,  loss = (output - target)^2 / 2
struct BranchingNet {
    static constexpr std::size_t hidden = 3;
    enum : std::size_t { W, b, left, right, c, spare, count };

    std::vector<Param<float>> floats;   ///< W (2 x 3) and b
    std::vector<Param<double>> doubles; ///< the heads, c and the spare one
    std::vector<std::vector<double>> velocities;

    explicit BranchingNet(double start = 1.0) {
        for (std::size_t const n : {2 * hidden, hidden}) {
            floats.emplace_back(n);
        }
        for (std::size_t const n : {hidden, hidden, std::size_t{1}, std::size_t{2}}) {
            doubles.emplace_back(n);
        }
        double next = start;
        for (auto& param : floats) {
            for (float& value : param.value) {
                value = static_cast<float>(0.5 * std::sin(next++));
            }
            velocities.emplace_back(param.value.size());
        }
        for (auto& param : doubles) {
            for (double& value : param.value) {
                value = 0.5 * std::sin(next++);
            }
            velocities.emplace_back(param.value.size());
        }
    }

    /// Calls f(parameter, index) for all of them.
    template <class F>
    void for_each(F const& f) {
        for (std::size_t i = 0; i < count; ++i) {
            i < 2 ? f(floats[i], i) : f(doubles[i - 2], i);
        }
    }

    /// Adds the gradient of a sample to `gradients`, times `scale`. Not inlined: one compilation for
    /// all who compare bits.
    [[gnu::noinline]] void add_gradient(
        Sample const& sample, double scale, std::vector<std::vector<double>>& gradients
    ) const {
        std::array<double, hidden> activation{};
        auto const& head = doubles[sample.takes_right_head ? 1 : 0].value;
        double output = doubles[2].value[0];
        for (std::size_t j = 0; j < hidden; ++j) {
            double sum = floats[1].value[j];
            for (std::size_t i = 0; i < 2; ++i) {
                sum += static_cast<double>(floats[0].value[i * hidden + j]) * sample.input[i];
            }
            activation[j] = std::tanh(sum);
            output += head[j] * activation[j];
        }
        double const error = scale * (output - sample.target);
        gradients[c][0] += error;
        for (std::size_t j = 0; j < hidden; ++j) {
            gradients[sample.takes_right_head ? right : left][j] += error * activation[j];
            double const inner = error * head[j] * (1.0 - activation[j] * activation[j]);
            gradients[b][j] += inner;
            for (std::size_t i = 0; i < 2; ++i) {
                gradients[W][i * hidden + j] += inner * sample.input[i];
            }
        }
    }
    /// No gradient yet.
    [[nodiscard]] std::vector<std::vector<double>> zero_gradients() const {
        return {
            std::vector<double>(2 * hidden),
            std::vector<double>(hidden),
            std::vector<double>(hidden),
            std::vector<double>(hidden),
            std::vector<double>(1),
            std::vector<double>(2)
        };
    }

    /// One parameter takes one step. Not inlined, see above.
    template <class T>
    [[gnu::noinline]] void
    step(Param<T>& param, std::size_t index, std::vector<T> const& gradient) {
        for (std::size_t i = 0; i < param.value.size(); ++i) {
            double& velocity = velocities[index][i];
            velocity = 0.875 * velocity + static_cast<double>(gradient[i]);
            param.value[i] = static_cast<T>(static_cast<double>(param.value[i]) - 0.125 * velocity);
        }
    }
};

} // namespace joinable_tests
