// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cmath>
#include <functional>
#include <memory>
#include <vector>

#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/parameters.hpp>

// Compiled once for the tests of all engines.

namespace joinable_tests {

/// A network of two layers as an engine writes it, of 3 inputs, 4 hidden units and 2 outputs:
/// y = V tanh(W x + b) + c, with half of the mean squared distance to the target as its loss.
class EngineNet {
public:
    EngineNet() = default;
    EngineNet(EngineNet const&) = delete;
    EngineNet& operator=(EngineNet const&) = delete;
    virtual ~EngineNet() = default;

    virtual joinable::ParameterList parameters() = 0;
    /// Makes the gradients those of the mean loss over these samples.
    virtual void backward(std::vector<int> const& samples) = 0;
    /// Takes `rate` times the gradients off the values.
    virtual void descend(double rate) = 0;
    /// All values, as the engine reads them.
    [[nodiscard]] virtual std::vector<double> numbers() const = 0;
};

/// Input `k` of a sample, its target `k`, and where a value starts.
inline double engine_input(int sample, int k) {
    return std::sin(1.0 + sample + 0.7 * k * sample);
}
inline double engine_target(int sample, int k) {
    return engine_input(sample, k) * engine_input(sample, 2) + 0.3 * k;
}
inline double engine_start(int row, int column) {
    return 0.6 * std::cos(1.0 + 2.1 * row + column);
}

/// Checks that joinable sees these extents and strides, and at each index, in row-major order, the element that the
/// engine has there.
void check_layout(
    joinable::AnyView const& view,
    joinable::Shape const& extents,
    joinable::Shape const& strides,
    std::vector<void const*> const& elements
);

/// Trains such networks over 1, 2, 3, 4 and 8 thread ranks and 3 process ranks that have different numbers of
/// batches of different sizes, rank 1 none at all. Checks that all ranks end with the values of one network that
/// is trained on the union of the batches of each round, and that a rank other than 0 starts with rank 0's.
void check_training(std::function<std::unique_ptr<EngineNet>()> const& make);

} // namespace joinable_tests
