// SPDX-License-Identifier: BSL-1.0
#pragma once

// The language model, with a backward pass written by hand.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "engine.hpp"

namespace train_text {

/// Predicts a byte from the `context` bytes before it: embedding, hidden layer, softmax. After
/// Bengio, Ducharme, Vincent, Jauvin: A Neural Probabilistic Language Model (2003).
class Model {
public:
    static constexpr std::size_t symbols = 256;
    static constexpr std::size_t context = 6;
    static constexpr std::size_t width = 8;
    static constexpr std::size_t hidden = 32;

    enum : std::size_t { embedding, hidden_weight, hidden_bias, output_weight, output_bias };

    explicit Model(std::uint64_t seed) {
        std::mt19937_64 random{seed};
        auto const make = [&](char const* name, std::size_t rows, std::size_t columns, float scale
                          ) {
            Parameter parameter{Matrix{rows, columns}, Matrix{rows, columns}, name};
            std::normal_distribution<float> normal{0.0F, 1.0F};
            for (float& number : parameter.value.numbers) {
                number = scale * normal(random);
            }
            parameters_.push_back(std::move(parameter));
        };
        auto const fan_in = [](std::size_t n) { return 1.0F / std::sqrt(static_cast<float>(n)); };
        make("embedding", symbols, width, 0.5F);
        make("hidden.weight", context * width, hidden, fan_in(context * width));
        make("hidden.bias", 1, hidden, 0.0F);
        make("output.weight", hidden, symbols, fan_in(hidden));
        make("output.bias", 1, symbols, 0.0F);
    }

    [[nodiscard]] std::vector<Parameter>& parameters() { return parameters_; }

    /// The input of forward().
    [[nodiscard]] static std::span<std::uint8_t const> load(std::span<std::uint8_t const> text) {
        return text;
    }

    /// Predicts the bytes of `text` at `positions`. `use(i)` waits for the value of parameter i,
    /// which exists during the lifetime of the returned object.
    template <class Use = AllValues>
    void forward(
        std::span<std::uint8_t const> text,
        std::span<std::size_t const> positions,
        Use const& use = {}
    ) {
        std::size_t const batch = positions.size();
        input_ = Matrix{batch, context * width};
        activation_ = Matrix{batch, hidden};
        probability_ = Matrix{batch, symbols};
        contexts_.assign(batch * context, 0);
        targets_.resize(batch);
        auto const table = use(embedding);
        for (std::size_t i = 0; i < batch; ++i) {
            targets_[i] = text[positions[i]];
            for (std::size_t c = 0; c < context; ++c) {
                std::size_t const back = context - c; // text before the first byte counts as zeros
                std::uint8_t const symbol =
                    positions[i] >= back ? text[positions[i] - back] : std::uint8_t{0};
                contexts_[i * context + c] = symbol;
                float const* const from = value(embedding).row(symbol);
                std::copy(from, from + width, input_.row(i) + c * width);
            }
        }
        apply(hidden_weight, hidden_bias, input_, activation_, use);
        for (float& number : activation_.numbers) {
            number = std::tanh(number);
        }
        apply(output_weight, output_bias, activation_, probability_, use);
        double bits = 0;
        for (std::size_t i = 0; i < batch; ++i) {
            bits -= std::log2(static_cast<double>(softmax(probability_.row(i), targets_[i])));
        }
        loss_ = bits / static_cast<double>(batch);
    }
    /// The mean loss of the last forward pass, in bits per byte.
    [[nodiscard]] double loss() const { return loss_; }

    /// Computes gradients of the mean loss of the last forward pass, in nats, the last layer first.
    /// Calls `ready(i)` when the gradient of parameter i is final. `use` as in forward().
    template <class Ready, class Use = AllValues>
    void backward(Ready const& ready, Use const& use = {}) {
        std::size_t const batch = targets_.size();
        Matrix delta = probability_; // of the logits: probability minus target, over the batch
        for (std::size_t i = 0; i < batch; ++i) {
            delta.row(i)[targets_[i]] -= 1.0F;
        }
        for (float& number : delta.numbers) {
            number /= static_cast<float>(batch);
        }
        sum_rows(delta, grad(output_bias));
        ready(output_bias);
        multiply_transposed(activation_, delta, grad(output_weight));
        ready(output_weight);

        Matrix hidden_delta{batch, hidden};
        multiply_by_transposed(delta, output_weight, hidden_delta, use);
        for (std::size_t i = 0; i < hidden_delta.numbers.size(); ++i) {
            float const a = activation_.numbers[i];
            hidden_delta.numbers[i] *= 1.0F - a * a;
        }
        sum_rows(hidden_delta, grad(hidden_bias));
        ready(hidden_bias);
        multiply_transposed(input_, hidden_delta, grad(hidden_weight));
        ready(hidden_weight);

        Matrix input_delta{batch, context * width};
        multiply_by_transposed(hidden_delta, hidden_weight, input_delta, use);
        Matrix& table = grad(embedding);
        table.numbers.assign(table.numbers.size(), 0.0F);
        for (std::size_t i = 0; i < batch; ++i) {
            for (std::size_t c = 0; c < context; ++c) {
                float* const to = table.row(contexts_[i * context + c]);
                float const* const from = input_delta.row(i) + c * width;
                for (std::size_t k = 0; k < width; ++k) {
                    to[k] += from[k];
                }
            }
        }
        ready(embedding);
    }

private:
    [[nodiscard]] Matrix& value(std::size_t i) { return parameters_[i].value; }
    [[nodiscard]] Matrix& grad(std::size_t i) { return parameters_[i].grad; }

    /// out = in * weight + bias
    template <class Use>
    void
    apply(std::size_t weight, std::size_t bias, Matrix const& in, Matrix& out, Use const& use) {
        auto const held_weight = use(weight);
        auto const held_bias = use(bias);
        for (std::size_t i = 0; i < out.rows; ++i) {
            std::copy(value(bias).numbers.begin(), value(bias).numbers.end(), out.row(i));
        }
        multiply_add(in, value(weight), out);
    }
    /// out += in * transpose(weight)
    template <class Use>
    void multiply_by_transposed(Matrix const& in, std::size_t weight, Matrix& out, Use const& use) {
        auto const held = use(weight);
        multiply_add(in, transposed(value(weight)), out);
    }

    /// Turns a row of logits into probabilities; returns the probability of `target`.
    static float softmax(float* row, std::size_t target) {
        float highest = row[0];
        for (std::size_t j = 1; j < symbols; ++j) {
            highest = std::max(highest, row[j]);
        }
        float sum = 0;
        for (std::size_t j = 0; j < symbols; ++j) {
            row[j] = std::exp(row[j] - highest);
            sum += row[j];
        }
        for (std::size_t j = 0; j < symbols; ++j) {
            row[j] /= sum;
        }
        return std::max(row[target], 1e-30F);
    }

    std::vector<Parameter> parameters_;
    Matrix input_;
    Matrix activation_;
    Matrix probability_;
    std::vector<std::uint8_t> contexts_;
    std::vector<std::uint8_t> targets_;
    double loss_ = 0;
};

} // namespace train_text
