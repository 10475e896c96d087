// SPDX-License-Identifier: BSL-1.0
#pragma once

// What the fragments of code in README.md and the guide are written beside: an engine of the reader's, with the parts
// that the text takes for granted.

#include <joinable/algorithms.hpp>
#include <joinable/any_communicator.hpp>
#include <joinable/compression.hpp>
#include <joinable/groups.hpp>
#include <joinable/hierarchical.hpp>
#include <joinable/join.hpp>
#include <joinable/refresh.hpp>
#include <joinable/shadowed.hpp>
#include <joinable/shared_memory.hpp>
#include <joinable/tcp.hpp>
#include <joinable/trace.hpp>
#include <joinable/zero.hpp>
#if __has_include(<nlohmann/json.hpp>)
#include <joinable/checkpoint.hpp>
#endif

#include <algorithm>
#include <array>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// Copies share their numbers.
class Tensor {
public:
    explicit Tensor(std::vector<std::size_t> shape, bool is_double = false)
        : shape_{std::move(shape)}, is_double_{is_double} {
        std::size_t bytes = is_double ? sizeof(double) : sizeof(float);
        for (std::size_t const extent : shape_) {
            bytes *= extent;
        }
        std::shared_ptr<std::byte[]> const owned{new std::byte[bytes]{}};
        data_ = {owned, owned.get()};
    }
    static Tensor over(void* memory, std::vector<std::size_t> shape, bool is_double) {
        Tensor tensor{{0}, is_double};
        tensor.data_ = {std::shared_ptr<void>{}, memory};
        tensor.shape_ = std::move(shape);
        return tensor;
    }
    [[nodiscard]] bool is_double() const { return is_double_; }
    [[nodiscard]] void* data() const { return data_.get(); }
    [[nodiscard]] std::vector<std::size_t> const& shape() const { return shape_; }

private:
    std::vector<std::size_t> shape_;
    std::shared_ptr<void> data_;
    bool is_double_;
};

struct Weights {
    std::vector<float> value, gradient;
};
struct Weight {
    std::string name;
    Tensor numbers;
    std::optional<Tensor> gradient;
    bool is_frozen = false;
};

/// An engine's family of dense matrices, columns one after another.
namespace house {

template <class T>
class Matrix {
public:
    using element = T;
    std::size_t const rows;
    std::size_t const columns;

    Matrix(std::size_t r, std::size_t c) : rows{r}, columns{c}, numbers_(r * c) {}
    [[nodiscard]] T* memory() { return numbers_.data(); }
    [[nodiscard]] T const* memory() const { return numbers_.data(); }

private:
    std::vector<T> numbers_;
};

template <class T>
class Column : public Matrix<T> {
public:
    explicit Column(std::size_t count) : Matrix<T>{count, 1} {}
};

/// An engine's optimizer of one array of numbers.
class Momentum {
public:
    void step(float rate, float* values, float const* gradient, std::size_t count) {
        velocity_.resize(count);
        for (std::size_t k = 0; k < count; ++k) {
            velocity_[k] = 0.9F * velocity_[k] + gradient[k];
            values[k] -= rate * velocity_[k];
        }
    }

private:
    std::vector<float> velocity_;
};

} // namespace house

/// What an engine's layers have in common, whatever their numbers are.
class Layer {
public:
    Layer() = default;
    Layer(Layer const&) = delete;
    Layer& operator=(Layer const&) = delete;
    virtual ~Layer() = default;
    [[nodiscard]] virtual bool is_double() const = 0;
    [[nodiscard]] virtual std::size_t count() const = 0;
    [[nodiscard]] virtual void* weights() = 0;
    [[nodiscard]] virtual void* gradients() = 0;
};

/// A table of words, and the rows of its gradient.
struct Embedding {
    std::size_t words;
    std::size_t width;
    std::vector<float> table;
    std::vector<std::int64_t> indices;
    std::vector<float> rows;
};

struct Batch {
    std::vector<float> samples;
    [[nodiscard]] std::size_t size() const { return samples.size(); }
};

/// Ranks have different numbers of batches, and these different sizes.
inline std::vector<Batch> batches_of(int rank) {
    std::vector<Batch> batches;
    for (int i = 0; i < 3 + rank; ++i) {
        batches.push_back({std::vector<float>(static_cast<std::size_t>(1 + i), 0.5F)});
    }
    return batches;
}

/// One number that approaches 1.
class Model {
public:
    struct Number {
        std::vector<float> value{0};
        std::vector<float> grad{0};
    };

    [[nodiscard]] std::vector<Number>& parameters() { return numbers_; }
    void zero_gradients() { numbers_[0].grad[0] = 0; }
    void forward(Batch const&) const {}
    template <class Ready>
    void backward(Ready const& ready) {
        numbers_[0].grad[0] += numbers_[0].value[0] - 1;
        ready(0);
    }
    [[nodiscard]] std::size_t layers() const { return numbers_.size(); }
    void forward_layer(std::size_t, Batch const&) const {}
    void backward_layer(std::size_t i) { numbers_[i].grad[0] += numbers_[i].value.at(0) - 1; }
    void descend() { numbers_[0].value[0] -= 0.5F * numbers_[0].grad[0]; }
    [[nodiscard]] bool is_good_enough() const { return numbers_[0].value[0] > 0.7F; }

private:
    std::vector<Number> numbers_{1};
};

/// Values can be taken away: they are copied into what is there.
template <>
struct joinable::parameter_traits<Model::Number> {
    using P = Model::Number;
    static std::vector<float>* value(P& p) { return &p.value; }
    static std::vector<float>* grad(P& p) { return &p.grad; }
    static void set_value(P& p, AnyView const& view) {
        auto const* const data = static_cast<float const*>(view.data());
        p.value.assign(data, data + view.numel());
    }
    static void release_value(P& p) { p.value = {}; }
};

inline void train(joinable::ThreadCommunicator& comm) {
    comm.barrier();
}
