// SPDX-License-Identifier: BSL-1.0
#pragma once

// The computations of the model's passes, number by number. Each kernel is a function object that
// computes the number at an index. A loop on the host or threads of a GPU run it for all indices.

#include <cmath>
#include <cstddef>
#include <cstdint>

// A macro, because only nvcc knows these words, and a GPU cannot call a function without them.
#if defined(__CUDACC__)
#define TRAIN_TEXT_KERNEL __host__ __device__
#else
#define TRAIN_TEXT_KERNEL
#endif

namespace train_text {

/// A strided matrix. A kernel's index counts along rows.
struct View {
    float* data;
    std::size_t rows;
    std::size_t columns;
    std::size_t row_step;
    std::size_t column_step = 1;

    [[nodiscard]] TRAIN_TEXT_KERNEL float& operator()(std::size_t i, std::size_t j) const {
        return data[i * row_step + j * column_step];
    }
    [[nodiscard]] std::size_t size() const { return rows * columns; }
    [[nodiscard]] View transposed() const { return {data, columns, rows, column_step, row_step}; }
};

/// The text before each position of a batch, and the symbol at the position.
struct Contexts {
    std::uint8_t const* text;
    std::size_t const* positions;
    std::size_t length;

    /// The text before the first byte counts as zeros.
    [[nodiscard]] TRAIN_TEXT_KERNEL std::uint8_t symbol(std::size_t i, std::size_t c) const {
        std::size_t const back = length - c;
        return positions[i] >= back ? text[positions[i] - back] : std::uint8_t{0};
    }
    [[nodiscard]] TRAIN_TEXT_KERNEL std::uint8_t target(std::size_t i) const {
        return text[positions[i]];
    }
};

/// Copies rows of the table side by side.
struct Embed {
    Contexts contexts;
    View table;
    View out;

    TRAIN_TEXT_KERNEL void operator()(std::size_t index) const {
        std::size_t const i = index / out.columns;
        std::size_t const j = index % out.columns;
        out(i, j) = table(contexts.symbol(i, j / table.columns), j % table.columns);
    }
};

struct Identity {
    TRAIN_TEXT_KERNEL float operator()(std::size_t, std::size_t, float number) const {
        return number;
    }
};
struct Tanh {
    TRAIN_TEXT_KERNEL float operator()(std::size_t, std::size_t, float number) const {
        return std::tanh(number);
    }
};
/// The backward pass of Tanh: multiplies by its derivative at `activation`.
struct TimesTanhDerivative {
    View activation;

    TRAIN_TEXT_KERNEL float operator()(std::size_t i, std::size_t j, float number) const {
        float const a = activation(i, j);
        return number * (1.0F - a * a);
    }
};

/// out = then(a * b + bias), where bias is a row or null. A real engine would use its BLAS.
template <class Then = Identity>
struct Product {
    View a;
    View b;
    View out;
    float const* bias = nullptr;
    Then then = {};

    TRAIN_TEXT_KERNEL void operator()(std::size_t index) const {
        std::size_t const i = index / out.columns;
        std::size_t const j = index % out.columns;
        float sum = bias == nullptr ? 0.0F : bias[j];
        for (std::size_t k = 0; k < a.columns; ++k) {
            sum += a(i, k) * b(k, j);
        }
        out(i, j) = then(i, j, sum);
    }
};

/// By row: computes the loss of the logits in bits, and replaces them by the gradient of the
/// batch's mean loss in nats, which is probability minus target.
struct SoftmaxLoss {
    Contexts contexts;
    View logits;
    double* bits;

    TRAIN_TEXT_KERNEL void operator()(std::size_t i) const {
        float highest = logits(i, 0);
        for (std::size_t j = 1; j < logits.columns; ++j) {
            highest = logits(i, j) > highest ? logits(i, j) : highest;
        }
        float sum = 0;
        for (std::size_t j = 0; j < logits.columns; ++j) {
            logits(i, j) = std::exp(logits(i, j) - highest);
            sum += logits(i, j);
        }
        std::uint8_t const target = contexts.target(i);
        float const probability = logits(i, target) / sum;
        bits[i] = -std::log2(static_cast<double>(probability > 1e-30F ? probability : 1e-30F));
        for (std::size_t j = 0; j < logits.columns; ++j) {
            float const wanted = j == target ? 1.0F : 0.0F;
            logits(i, j) = (logits(i, j) / sum - wanted) / static_cast<float>(logits.rows);
        }
    }
};

/// By column.
struct SumRows {
    View a;
    float* out;

    TRAIN_TEXT_KERNEL void operator()(std::size_t j) const {
        float sum = 0;
        for (std::size_t i = 0; i < a.rows; ++i) {
            sum += a(i, j);
        }
        out[j] = sum;
    }
};

/// The backward pass of Embed. Each number of the table gathers from the positions that used its
/// row, in the order of the batch. No two threads add to one number, so the bits are always the
/// same.
struct GatherEmbedding {
    Contexts contexts;
    View delta;
    View table;

    TRAIN_TEXT_KERNEL void operator()(std::size_t index) const {
        std::size_t const symbol = index / table.columns;
        std::size_t const k = index % table.columns;
        float sum = 0;
        for (std::size_t i = 0; i < delta.rows; ++i) {
            for (std::size_t c = 0; c < contexts.length; ++c) {
                if (contexts.symbol(i, c) == symbol) {
                    sum += delta(i, c * table.columns + k);
                }
            }
        }
        table(symbol, k) = sum;
    }
};

/// A step of stochastic gradient descent.
struct Descend {
    float rate;
    float momentum;
    float const* grad;
    float* velocity;
    float* value;

    TRAIN_TEXT_KERNEL void operator()(std::size_t index) const {
        velocity[index] = momentum * velocity[index] + grad[index];
        value[index] -= rate * velocity[index];
    }
};

} // namespace train_text
