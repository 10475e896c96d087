// SPDX-License-Identifier: BSL-1.0
#pragma once

// A small engine of its own: a matrix, a parameter, products, and an optimizer. Only the traits
// after the matrix know joinable.

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/parameter.hpp>
#include <joinable/tensor/traits.hpp>

namespace train_text {

struct Matrix {
    std::size_t rows = 0;
    std::size_t columns = 0;
    std::vector<float> numbers = std::vector<float>(rows * columns);

    [[nodiscard]] float* row(std::size_t i) { return numbers.data() + i * columns; }
    [[nodiscard]] float const* row(std::size_t i) const { return numbers.data() + i * columns; }
};

} // namespace train_text

template <>
struct joinable::tensor_traits<train_text::Matrix> {
    using value_type = float;
    static float* data(train_text::Matrix& m) { return m.numbers.data(); }
    static float const* data(train_text::Matrix const& m) { return m.numbers.data(); }
    static std::array<std::size_t, 2> extents(train_text::Matrix const& m) {
        return {{m.rows, m.columns}};
    }
};

namespace train_text {

struct Parameter {
    Matrix value;
    Matrix grad;
    std::string name;
};

/// Stands for `use` if every parameter always has its value, so that a pass never waits.
struct AllValues {
    struct Held {
        ~Held() {} // so that compilers see a use of it
    };
    Held operator()(std::size_t) const { return {}; }
};

} // namespace train_text

/// The value can be released, and set from numbers that are copied.
template <>
struct joinable::parameter_traits<train_text::Parameter> {
    using P = train_text::Parameter;
    static train_text::Matrix* value(P& p) { return &p.value; }
    static train_text::Matrix* grad(P& p) { return &p.grad; }
    static std::string_view name(P const& p) { return p.name; }
    static void set_value(P& p, joinable::AnyView const& view) {
        auto const* const numbers = static_cast<float const*>(view.data());
        p.value.numbers.assign(numbers, numbers + view.numel());
    }
    static void release_value(P& p) { p.value.numbers = {}; }
};

namespace train_text {

void multiply_add(Matrix const& a, Matrix const& b, Matrix& out);        ///< out += a * b
void multiply_transposed(Matrix const& a, Matrix const& b, Matrix& out); ///< out = transpose(a) * b
[[nodiscard]] Matrix transposed(Matrix const& a);
void sum_rows(Matrix const& a, Matrix& out);

/// A learning rate that falls linearly to zero over `steps`, because the last rounds of an epoch
/// have fewer active ranks and therefore noisier averages.
class FallingRate {
public:
    FallingRate(float start, std::size_t steps) : start_{start}, steps_{steps} {}

    /// The rate of a step, counted from 0.
    [[nodiscard]] float at(std::size_t step) const {
        return start_ *
               (1.0F - static_cast<float>(step) / static_cast<float>(std::max(step + 1, steps_)));
    }
    [[nodiscard]] float next() { return at(step_++); }

private:
    float start_;
    std::size_t steps_;
    std::size_t step_ = 0;
};

/// Stochastic gradient descent with momentum.
class Sgd {
public:
    Sgd(std::vector<Parameter> const& parameters, FallingRate rate, float momentum)
        : rate_{rate}, momentum_{momentum} {
        for (Parameter const& parameter : parameters) {
            velocity_.emplace_back(parameter.value.numbers.size());
        }
    }

    void step(std::vector<Parameter>& parameters) {
        float const rate = rate_.next();
        for (std::size_t p = 0; p < parameters.size(); ++p) {
            float* const value = parameters[p].value.numbers.data();
            float const* const grad = parameters[p].grad.numbers.data();
            float* const velocity = velocity_[p].data();
            for (std::size_t i = 0; i < velocity_[p].size(); ++i) {
                velocity[i] = momentum_ * velocity[i] + grad[i];
                value[i] -= rate * velocity[i];
            }
        }
    }

    [[nodiscard]] std::vector<std::vector<float>> const& velocity() const { return velocity_; }

private:
    FallingRate rate_;
    float momentum_;
    std::vector<std::vector<float>> velocity_;
};

} // namespace train_text
