// SPDX-License-Identifier: BSL-1.0
#pragma once

// The model of model.hpp in the memory of a device, with passes and optimizer as kernels.
// Operations are enqueued; the host waits only for what it reads.

#include <joinable/core.hpp>

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data.hpp"
#include "kernels.hpp"
#include "model.hpp"

namespace train_text {

/// Numbers in the memory of a device.
template <class T>
class DeviceArray {
public:
    DeviceArray() = default;
    DeviceArray(joinable::Device& memory, std::size_t size)
        : memory_{memory.allocate(size * sizeof(T), 256)} {}

    [[nodiscard]] T* data() const { return reinterpret_cast<T*>(memory_.data()); }
    [[nodiscard]] std::size_t size() const { return memory_.bytes() / sizeof(T); }

private:
    joinable::Arena memory_;
};

struct DeviceParameter {
    std::string name;
    std::size_t rows;
    std::size_t columns;
    DeviceArray<float> own_value; ///< until joinable keeps the value
    DeviceArray<float> own_grad;
    joinable::AnyView value;
    joinable::AnyView grad; ///< in a bucket, if ranks have all averages there

    DeviceParameter(joinable::Device& memory, Parameter const& start)
        : name{start.name}, rows{start.value.rows}, columns{start.value.columns},
          own_value{memory, size()}, own_grad{memory, size()},
          value{tensor(own_value.data(), memory.id())}, grad{tensor(own_grad.data(), memory.id())} {
    }

    [[nodiscard]] std::size_t size() const { return rows * columns; }

private:
    [[nodiscard]] joinable::AnyView tensor(float* data, joinable::DeviceId where) const {
        return {data, joinable::DType::f32, {rows, columns}, {columns, 1}, where};
    }
};

} // namespace train_text

/// The value can be released, and set to where joinable keeps it for a while.
template <>
struct joinable::parameter_traits<train_text::DeviceParameter> {
    using P = train_text::DeviceParameter;
    static AnyView* value(P& p) { return p.value ? &p.value : nullptr; }
    static AnyView* grad(P& p) { return &p.grad; }
    static std::string_view name(P const& p) { return p.name; }
    static void set_grad(P& p, AnyView const& view) { p.grad = view; }
    static void set_value(P& p, AnyView const& view) { p.value = view; }
    static void release_value(P& p) {
        p.value = {};
        p.own_value = {};
    }
};

namespace train_text {

/// Runs kernels immediately on the host.
struct HostLoop {
    template <class Kernel>
    void operator()(std::size_t count, Kernel const& kernel) const {
        for (std::size_t i = 0; i < count; ++i) {
            kernel(i);
        }
    }
};

/// The counterpart of Model, and starts with its numbers. `launch(count, kernel)` runs kernel(0) to
/// kernel(count - 1), in order with the memory's other operations.
template <class Launch>
class DeviceModel {
public:
    DeviceModel(joinable::Device& memory, Launch launch, Model start)
        : memory_{memory}, launch_{std::move(launch)} {
        for (Parameter const& parameter : start.parameters()) {
            parameters_.emplace_back(memory_, parameter);
            put(parameter.value.numbers, parameters_.back().value.data());
        }
        read<float>(parameters_.front().value.data(), 1); // waits until all numbers are written
    }

    [[nodiscard]] std::vector<DeviceParameter>& parameters() { return parameters_; }

    /// The input of forward().
    [[nodiscard]] DeviceArray<std::uint8_t> load(Text const& text) {
        DeviceArray<std::uint8_t> loaded{memory_, text.size()};
        put(text, loaded.data());
        read<std::uint8_t>(loaded.data(), 1);
        return loaded;
    }

    /// `positions` must stay valid until the device has read it. The value of parameter i is there
    /// during the lifetime of `use(i)`, and for the kernels that are launched meanwhile.
    template <class Use = AllValues>
    void forward(
        DeviceArray<std::uint8_t> const& text,
        std::vector<std::size_t> const& positions,
        Use const& use = {}
    ) {
        make_room(positions.size());
        put(positions, positions_.data());
        contexts_ = {text.data(), positions_.data(), Model::context};
        {
            auto const held = use(Model::embedding);
            run(Embed{contexts_, value(Model::embedding), input()});
        }
        apply<Tanh>(Model::hidden_weight, Model::hidden_bias, input(), activation(), use);
        apply<Identity>(Model::output_weight, Model::output_bias, activation(), delta(), use);
        launch_(batch_, SoftmaxLoss{contexts_, delta(), bits_.data()});
    }
    /// The mean loss of the last forward pass, in bits. Blocks.
    [[nodiscard]] double loss() {
        std::vector<double> const bits = read<double>(bits_.data(), batch_);
        return std::accumulate(bits.begin(), bits.end(), 0.0) / static_cast<double>(batch_);
    }

    /// Call it once after each forward pass. It calls `ready(i)` as soon as the kernel for gradient
    /// i is enqueued, so that its bucket travels while other gradients are computed. `use` as in
    /// forward().
    template <class Ready, class Use = AllValues>
    void backward(Ready const& ready, Use const& use = {}) {
        launch_(Model::symbols, SumRows{delta(), grad(Model::output_bias).data});
        ready(Model::output_bias);
        run(Product<>{activation().transposed(), delta(), grad(Model::output_weight)});
        ready(Model::output_weight);

        {
            auto const held = use(Model::output_weight);
            run(Product<TimesTanhDerivative>{
                delta(),
                value(Model::output_weight).transposed(),
                hidden_delta(),
                nullptr,
                {activation()}
            });
        }
        launch_(Model::hidden, SumRows{hidden_delta(), grad(Model::hidden_bias).data});
        ready(Model::hidden_bias);
        run(Product<>{input().transposed(), hidden_delta(), grad(Model::hidden_weight)});
        ready(Model::hidden_weight);

        // The input is not needed any more, so its gradient overwrites it.
        {
            auto const held = use(Model::hidden_weight);
            run(Product<>{hidden_delta(), value(Model::hidden_weight).transposed(), input()});
        }
        View const table = grad(Model::embedding);
        launch_(table.size(), GatherEmbedding{contexts_, input(), table});
        ready(Model::embedding);
    }

    /// Reads `count` elements of the memory after all enqueued operations have run. Blocks.
    template <class T>
    std::vector<T> read(void const* data, std::size_t count) {
        std::vector<T> elements(count);
        memory_.download(data, elements.data(), count * sizeof(T));
        return elements;
    }

private:
    template <class T>
    void put(std::vector<T> const& elements, void* data) {
        memory_.upload(elements.data(), data, elements.size() * sizeof(T));
    }
    template <class Then>
    void run(Product<Then> const& product) {
        launch_(product.out.size(), product);
    }
    void run(Embed const& embed) { launch_(embed.out.size(), embed); }
    /// out = then(in * weight + bias)
    template <class Then, class Use>
    void apply(std::size_t weight, std::size_t bias, View in, View out, Use const& use) {
        auto const held_weight = use(weight);
        auto const held_bias = use(bias);
        run(Product<Then>{in, value(weight), out, value(bias).data});
    }

    void make_room(std::size_t batch) {
        batch_ = batch;
        if (batch > positions_.size()) {
            positions_ = {memory_, batch};
            bits_ = {memory_, batch};
            numbers_ = {memory_, batch * (inputs + 2 * Model::hidden + Model::symbols)};
        }
    }
    /// The matrices follow each other in `numbers_`, with a row for each position of the batch.
    [[nodiscard]] View part(std::size_t first_column, std::size_t columns) const {
        return {numbers_.data() + positions_.size() * first_column, batch_, columns, columns};
    }
    [[nodiscard]] View input() const { return part(0, inputs); }
    [[nodiscard]] View activation() const { return part(inputs, Model::hidden); }
    [[nodiscard]] View hidden_delta() const { return part(inputs + Model::hidden, Model::hidden); }
    [[nodiscard]] View delta() const { return part(inputs + 2 * Model::hidden, Model::symbols); }
    [[nodiscard]] View value(std::size_t p) const { return matrix(p, parameters_[p].value); }
    [[nodiscard]] View grad(std::size_t p) const { return matrix(p, parameters_[p].grad); }
    [[nodiscard]] View matrix(std::size_t p, joinable::AnyView const& tensor) const {
        DeviceParameter const& parameter = parameters_[p];
        return {
            static_cast<float*>(tensor.data()), parameter.rows, parameter.columns, parameter.columns
        };
    }

    static constexpr std::size_t inputs = Model::context * Model::width;

    joinable::Device& memory_;
    Launch launch_;
    std::vector<DeviceParameter> parameters_;
    std::size_t batch_ = 0; ///< of the last forward pass
    DeviceArray<std::size_t> positions_;
    DeviceArray<double> bits_;
    DeviceArray<float> numbers_;
    Contexts contexts_{};
};

/// The counterpart of Sgd.
template <class Launch>
class DeviceSgd {
public:
    DeviceSgd(
        joinable::Device& memory,
        Launch launch,
        std::vector<DeviceParameter> const& parameters,
        FallingRate rate,
        float momentum
    )
        : launch_{std::move(launch)}, rate_{rate}, momentum_{momentum} {
        for (DeviceParameter const& parameter : parameters) {
            velocity_.emplace_back(memory, parameter.size());
        }
    }

    void step(std::vector<DeviceParameter>& parameters) {
        float const rate = rate_.next();
        for (std::size_t p = 0; p < parameters.size(); ++p) {
            auto* const value = static_cast<float*>(parameters[p].value.data());
            auto const* const grad = static_cast<float const*>(parameters[p].grad.data());
            launch_(
                parameters[p].size(), Descend{rate, momentum_, grad, velocity_[p].data(), value}
            );
        }
    }

    [[nodiscard]] std::vector<DeviceArray<float>> const& velocity() const { return velocity_; }

private:
    Launch launch_;
    FallingRate rate_;
    float momentum_;
    std::vector<DeviceArray<float>> velocity_;
};

/// Blocks.
template <class Launch>
std::vector<std::vector<float>> values_of(DeviceModel<Launch>& model) {
    std::vector<std::vector<float>> values;
    for (DeviceParameter const& parameter : model.parameters()) {
        values.push_back(model.template read<float>(parameter.value.data(), parameter.size()));
    }
    return values;
}

/// All parameters, then all momentum. Blocks.
template <class Launch>
std::vector<std::vector<float>>
state_of(DeviceModel<Launch>& model, DeviceSgd<Launch> const& optimizer) {
    std::vector<std::vector<float>> state = values_of(model);
    for (DeviceArray<float> const& velocity : optimizer.velocity()) {
        state.push_back(model.template read<float>(velocity.data(), velocity.size()));
    }
    return state;
}

} // namespace train_text
