// SPDX-License-Identifier: BSL-1.0
#pragma once

// A small engine of its own: GPT-2 over bytes, with passes written by hand. As in llm.c, all values
// lie in one memory and all gradients in another. Nothing here knows joinable.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <numeric>
#include <random>
#include <span>
#include <vector>

namespace gpt {

template <class T>
T dot(T const* a, T const* b, std::size_t n) {
    T sums[8]{}; // eight independent sums, which compilers compute side by side
    std::size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        for (std::size_t k = 0; k < 8; ++k) {
            sums[k] += a[i + k] * b[i + k];
        }
    }
    for (; i < n; ++i) {
        sums[0] += a[i] * b[i];
    }
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) +
           ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

/// out += factor * a
template <class T>
void add(T* out, T factor, T const* a, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) {
        out[i] += factor * a[i];
    }
}

/// Replaces scores by probabilities. Returns the logarithm of the sum of the scores' exponentials.
template <class T>
T softmax(T* row, std::size_t n) {
    T const highest = *std::max_element(row, row + n);
    T sum = 0;
    for (std::size_t i = 0; i < n; ++i) {
        sum += row[i] = std::exp(row[i] - highest);
    }
    for (std::size_t i = 0; i < n; ++i) {
        row[i] /= sum;
    }
    return highest + std::log(sum);
}

/// GELU and its slope at a number, by GPT-2's formula with tanh.
template <class T>
struct Gelu {
    explicit Gelu(T x) {
        T const root = T(0.7978845608028654); // of 2 / pi
        T const inner = std::tanh(root * (x + T(0.044715) * x * x * x));
        value = x * (1 + inner) / 2;
        slope = (1 + inner + x * (1 - inner * inner) * root * (1 + T(3 * 0.044715) * x * x)) / 2;
    }
    T value, slope;
};

/// Normalises a row: (x - mean) * scale.
template <class T>
struct Moments {
    Moments(T const* row, std::size_t n) {
        for (std::size_t i = 0; i < n; ++i) {
            mean += row[i] / static_cast<T>(n);
        }
        T variance = 0;
        for (std::size_t i = 0; i < n; ++i) {
            variance += (row[i] - mean) * (row[i] - mean) / static_cast<T>(n);
        }
        scale = 1 / std::sqrt(variance + T(1e-5));
    }
    T mean = 0, scale;
};

/// Sequences of at least two bytes. Each byte but the first is predicted from those before it.
using Batch = std::vector<std::span<std::uint8_t const>>;

/// How many bytes of a batch are predicted.
inline std::size_t tokens_of(Batch const& batch) {
    std::size_t tokens = 0;
    for (auto const& sequence : batch) {
        tokens += sequence.size() - 1;
    }
    return tokens;
}

struct Shape {
    std::size_t layers = 3;
    std::size_t heads = 3;
    std::size_t width = 48;    ///< a multiple of heads
    std::size_t context = 64;  ///< no sequence has more than one byte more
    std::size_t symbols = 256; ///< all bytes are below this
};

template <class T>
class Gpt {
    using Numbers = std::vector<T>;

public:
    /// Parameters are two embeddings, twelve for each layer, and the last normalisation: a weight
    /// and the bias after it. The embedding of symbols is the matrix of the output, too.
    enum : std::size_t { symbol_embedding, position_embedding, first_of_layers };
    enum : std::size_t {
        norm1 = 0,
        qkv = 2,
        mix = 4,
        norm2 = 6,
        widen = 8,
        narrow = 10,
        per_layer = 12
    };

    Gpt(Shape const& shape, std::uint64_t seed) : shape_{shape}, layers_(shape.layers) {
        std::mt19937_64 random{seed};
        std::normal_distribution<T> normal{0, T(0.06)}; // GPT-2 has 0.02 for a width of 768
        auto const draw = [&](std::size_t size, T scale = 1) {
            sizes_.push_back(size);
            std::generate_n(std::back_inserter(values_), size, [&] {
                return scale * normal(random);
            });
        };
        auto const fill = [&](std::size_t size, T value) {
            sizes_.push_back(size);
            values_.insert(values_.end(), size, value);
        };
        std::size_t const n = shape.width;
        T const added = 1 / std::sqrt(static_cast<T>(2 * shape.layers)); // so many parts are added
        auto const draw_norm = [&] { fill(n, 1), fill(n, 0); };
        draw(shape.symbols * n);
        draw(shape.context * n);
        for (std::size_t layer = 0; layer < shape.layers; ++layer) {
            draw_norm();
            draw(n * 3 * n), fill(3 * n, 0);
            draw(n * n, added), fill(n, 0);
            draw_norm();
            draw(n * 4 * n), fill(4 * n, 0);
            draw(4 * n * n, added), fill(n, 0);
        }
        draw_norm();
        std::exclusive_scan(
            sizes_.begin(), sizes_.end(), std::back_inserter(offsets_), std::size_t{0}
        );
        gradients_.resize(values_.size());
    }

    [[nodiscard]] Numbers& values() { return values_; }
    [[nodiscard]] Numbers& gradients() { return gradients_; }
    [[nodiscard]] std::vector<std::size_t> const& sizes() const { return sizes_; }
    [[nodiscard]] Shape const& shape() const { return shape_; }

    /// The mean of -log(probability) over the predicted bytes. Keeps what backward() needs.
    T forward(Batch const& batch) {
        batch_ = batch;
        rows_ = tokens_of(batch);
        std::size_t const n = shape_.width;
        states_.resize(rows_ * n);
        each_row([&](std::size_t row, std::size_t t, std::uint8_t byte, std::uint8_t) {
            T const* const symbol = value(symbol_embedding) + byte * n;
            T const* const position = value(position_embedding) + t * n;
            std::transform(symbol, symbol + n, position, &states_[row * n], std::plus<>{});
        });
        for (std::size_t layer = 0; layer < shape_.layers; ++layer) {
            forward_layer(layers_[layer], first_of_layers + layer * per_layer);
        }
        normalise(last_, states_, last_norm());
        probabilities_.resize(rows_ * shape_.symbols);
        T loss = 0;
        each_row([&](std::size_t row, std::size_t, std::uint8_t, std::uint8_t target) {
            T* const scores = &probabilities_[row * shape_.symbols];
            for (std::size_t s = 0; s < shape_.symbols; ++s) {
                scores[s] = dot(&last_[row * n], value(symbol_embedding) + s * n, n);
            }
            T const score = scores[target];
            loss += (softmax(scores, shape_.symbols) - score) / static_cast<T>(rows_);
        });
        return loss;
    }
    /// The last forward pass's probabilities of the very last byte.
    [[nodiscard]] std::span<T const> last_probabilities() const {
        return std::span{probabilities_}.last(shape_.symbols);
    }

    /// Writes the gradients of forward()'s result, from the last layer to the first. Calls
    /// ready(i) when the gradient of parameter i is final.
    template <class Ready>
    void backward(Ready ready) {
        std::size_t const n = shape_.width;
        std::fill(gradients_.begin(), gradients_.end(), T{0});
        Numbers dlast(rows_ * n);
        each_row([&](std::size_t row, std::size_t, std::uint8_t, std::uint8_t target) {
            for (std::size_t s = 0; s < shape_.symbols; ++s) {
                T const wanted = s == target ? T{1} : T{0};
                T const slope =
                    (probabilities_[row * shape_.symbols + s] - wanted) / static_cast<T>(rows_);
                add(&dlast[row * n], slope, value(symbol_embedding) + s * n, n);
                add(grad(symbol_embedding) + s * n, slope, &last_[row * n], n);
            }
        });
        dstates_.assign(rows_ * n, T{0});
        normalise_backward(dlast, states_, last_norm(), ready);
        for (std::size_t layer = shape_.layers; layer-- > 0;) {
            backward_layer(layers_[layer], first_of_layers + layer * per_layer, ready);
        }
        each_row([&](std::size_t row, std::size_t t, std::uint8_t byte, std::uint8_t) {
            add(grad(symbol_embedding) + byte * n, T{1}, &dstates_[row * n], n);
            add(grad(position_embedding) + t * n, T{1}, &dstates_[row * n], n);
        });
        ready(position_embedding);
        ready(symbol_embedding);
    }

private:
    /// What a layer's forward pass leaves for its backward pass.
    struct Layer {
        Numbers before, normal1, qkv, shares, mixed, between, normal2, wide, bent;
    };

    [[nodiscard]] T const* value(std::size_t parameter) const {
        return &values_[offsets_[parameter]];
    }
    [[nodiscard]] T* grad(std::size_t parameter) { return &gradients_[offsets_[parameter]]; }
    [[nodiscard]] std::size_t last_norm() const {
        return first_of_layers + shape_.layers * per_layer;
    }

    /// Calls body(row, position, byte, next byte) for each predicted byte.
    template <class Body>
    void each_row(Body body) const {
        std::size_t row = 0;
        for (auto const& sequence : batch_) {
            for (std::size_t t = 0; t + 1 < sequence.size(); ++t) {
                body(row++, t, sequence[t], sequence[t + 1]);
            }
        }
    }
    /// Calls body(first row, length, first column, first share) for each sequence and head.
    template <class Body>
    void each_head(Body body) const {
        std::size_t row = 0;
        std::size_t share = 0;
        for (auto const& sequence : batch_) {
            std::size_t const length = sequence.size() - 1;
            for (std::size_t h = 0; h < shape_.heads; ++h, share += length * length) {
                body(row, length, h * head(), share);
            }
            row += length;
        }
    }
    [[nodiscard]] std::size_t head() const { return shape_.width / shape_.heads; }

    // Kernels. `weight` is the number of a parameter; the one after it is the bias.

    /// A weight lies as [inputs][outputs].
    void linear(Numbers& out, Numbers const& in, std::size_t weight) const {
        std::size_t const outputs = sizes_[weight + 1];
        std::size_t const inputs = sizes_[weight] / outputs;
        out.resize(rows_ * outputs);
        for (std::size_t row = 0; row < rows_; ++row) {
            std::copy_n(value(weight + 1), outputs, &out[row * outputs]);
            for (std::size_t i = 0; i < inputs; ++i) {
                add(&out[row * outputs], in[row * inputs + i], value(weight) + i * outputs, outputs
                );
            }
        }
    }
    template <class Ready>
    void linear_backward(
        Numbers& din, Numbers const& dout, Numbers const& in, std::size_t weight, Ready const& ready
    ) {
        std::size_t const outputs = sizes_[weight + 1];
        std::size_t const inputs = sizes_[weight] / outputs;
        din.resize(rows_ * inputs);
        for (std::size_t row = 0; row < rows_; ++row) {
            T const* const slopes = &dout[row * outputs];
            add(grad(weight + 1), T{1}, slopes, outputs);
            for (std::size_t i = 0; i < inputs; ++i) {
                din[row * inputs + i] = dot(value(weight) + i * outputs, slopes, outputs);
                add(grad(weight) + i * outputs, in[row * inputs + i], slopes, outputs);
            }
        }
        ready(weight + 1);
        ready(weight);
    }

    void normalise(Numbers& out, Numbers const& in, std::size_t weight) const {
        std::size_t const n = shape_.width;
        out.resize(rows_ * n);
        for (std::size_t row = 0; row < rows_ * n; row += n) {
            Moments<T> const moments{&in[row], n};
            for (std::size_t i = 0; i < n; ++i) {
                T const normal = (in[row + i] - moments.mean) * moments.scale;
                out[row + i] = normal * value(weight)[i] + value(weight + 1)[i];
            }
        }
    }
    /// Adds to the gradients of the states.
    template <class Ready>
    void normalise_backward(
        Numbers const& dout, Numbers const& in, std::size_t weight, Ready const& ready
    ) {
        std::size_t const n = shape_.width;
        for (std::size_t row = 0; row < rows_ * n; row += n) {
            Moments<T> const moments{&in[row], n};
            auto const normal = [&](std::size_t i) {
                return (in[row + i] - moments.mean) * moments.scale;
            };
            T mean = 0;
            T slope = 0;
            for (std::size_t i = 0; i < n; ++i) {
                T const scaled = dout[row + i] * value(weight)[i] / static_cast<T>(n);
                mean += scaled;
                slope += scaled * normal(i);
                grad(weight)[i] += dout[row + i] * normal(i);
                grad(weight + 1)[i] += dout[row + i];
            }
            for (std::size_t i = 0; i < n; ++i) {
                T const scaled = dout[row + i] * value(weight)[i];
                dstates_[row + i] += (scaled - mean - normal(i) * slope) * moments.scale;
            }
        }
        ready(weight + 1);
        ready(weight);
    }

    /// A row of qkv is a query, a key and a value. A row of shares says how much a position takes
    /// from each position up to itself.
    void attend(Layer& layer) const {
        std::size_t const n = shape_.width;
        T const scale = 1 / std::sqrt(static_cast<T>(head()));
        layer.mixed.assign(rows_ * n, T{0});
        std::size_t count = 0;
        each_head([&](auto, std::size_t length, auto, auto) { count += length * length; });
        layer.shares.resize(count);
        each_head([&](std::size_t row, std::size_t length, std::size_t column, std::size_t share) {
            T const* const queries = &layer.qkv[row * 3 * n + column];
            for (std::size_t t = 0; t < length; ++t) {
                T* const shares = &layer.shares[share + t * length];
                for (std::size_t s = 0; s <= t; ++s) {
                    shares[s] = scale * dot(queries + t * 3 * n, queries + s * 3 * n + n, head());
                }
                softmax(shares, t + 1);
                for (std::size_t s = 0; s <= t; ++s) {
                    add(&layer.mixed[(row + t) * n + column],
                        shares[s],
                        queries + s * 3 * n + 2 * n,
                        head());
                }
            }
        });
    }
    void attend_backward(Numbers& dqkv, Numbers const& dmixed, Layer const& layer) const {
        std::size_t const n = shape_.width;
        T const scale = 1 / std::sqrt(static_cast<T>(head()));
        dqkv.assign(rows_ * 3 * n, T{0});
        Numbers dshares(shape_.context);
        each_head([&](std::size_t row, std::size_t length, std::size_t column, std::size_t share) {
            T const* const queries = &layer.qkv[row * 3 * n + column];
            T* const dqueries = &dqkv[row * 3 * n + column];
            for (std::size_t t = 0; t < length; ++t) {
                T const* const shares = &layer.shares[share + t * length];
                T const* const slopes = &dmixed[(row + t) * n + column];
                T mean = 0;
                for (std::size_t s = 0; s <= t; ++s) {
                    dshares[s] = dot(slopes, queries + s * 3 * n + 2 * n, head());
                    mean += shares[s] * dshares[s];
                    add(dqueries + s * 3 * n + 2 * n, shares[s], slopes, head());
                }
                for (std::size_t s = 0; s <= t; ++s) {
                    T const slope = scale * shares[s] * (dshares[s] - mean);
                    add(dqueries + t * 3 * n, slope, queries + s * 3 * n + n, head());
                    add(dqueries + s * 3 * n + n, slope, queries + t * 3 * n, head());
                }
            }
        });
    }

    /// The first parameter of the layer is number p.
    void forward_layer(Layer& layer, std::size_t p) {
        Numbers added;
        layer.before = states_;
        normalise(layer.normal1, states_, p + norm1);
        linear(layer.qkv, layer.normal1, p + qkv);
        attend(layer);
        linear(added, layer.mixed, p + mix);
        add(states_.data(), T{1}, added.data(), added.size());
        layer.between = states_;
        normalise(layer.normal2, states_, p + norm2);
        linear(layer.wide, layer.normal2, p + widen);
        layer.bent.resize(layer.wide.size());
        for (std::size_t i = 0; i < layer.wide.size(); ++i) {
            Gelu<T> const gelu{layer.wide[i]};
            layer.bent[i] = gelu.value;
            layer.wide[i] = gelu.slope; // all that the backward pass needs
        }
        linear(added, layer.bent, p + narrow);
        add(states_.data(), T{1}, added.data(), added.size());
    }
    template <class Ready>
    void backward_layer(Layer const& layer, std::size_t p, Ready const& ready) {
        Numbers dnarrow;
        Numbers dwide;
        linear_backward(dwide, dstates_, layer.bent, p + narrow, ready);
        for (std::size_t i = 0; i < dwide.size(); ++i) {
            dwide[i] *= layer.wide[i];
        }
        linear_backward(dnarrow, dwide, layer.normal2, p + widen, ready);
        normalise_backward(dnarrow, layer.between, p + norm2, ready);
        linear_backward(dnarrow, dstates_, layer.mixed, p + mix, ready);
        attend_backward(dwide, dnarrow, layer);
        linear_backward(dnarrow, dwide, layer.normal1, p + qkv, ready);
        normalise_backward(dnarrow, layer.before, p + norm1, ready);
    }

    Shape shape_;
    Numbers values_, gradients_;
    std::vector<std::size_t> sizes_, offsets_; // of parameters
    Batch batch_;                              // of the last forward pass, like all below
    std::size_t rows_ = 0;
    std::vector<Layer> layers_;
    Numbers states_, dstates_, last_, probabilities_;
};

/// Adam with decoupled weight decay (Loshchilov and Hutter, 2019), over the two memories.
template <class T>
struct AdamW {
    T rate, decay;
    std::vector<T> means = {}, squares = {};
    int steps = 0;

    void step(std::vector<T>& values, std::vector<T> const& gradients) {
        constexpr T beta1 = T(0.9);
        constexpr T beta2 = T(0.999);
        means.resize(values.size());
        squares.resize(values.size());
        ++steps;
        T const part1 = 1 - std::pow(beta1, static_cast<T>(steps));
        T const part2 = 1 - std::pow(beta2, static_cast<T>(steps));
        for (std::size_t i = 0; i < values.size(); ++i) {
            means[i] = beta1 * means[i] + (1 - beta1) * gradients[i];
            squares[i] = beta2 * squares[i] + (1 - beta2) * gradients[i] * gradients[i];
            T const size = std::sqrt(squares[i] / part2) + T(1e-8);
            values[i] -= rate * (means[i] / part1 / size + decay * values[i]);
        }
    }
};

} // namespace gpt
