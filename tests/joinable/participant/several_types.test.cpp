// SPDX-License-Identifier: BSL-1.0
// A model whose tensors have several types trains to the same bits, whichever way its engine keeps them.
#include <joinable/tensor/parameters.hpp>

#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>

#include <joinable/communicator/collectives.hpp>
#include <joinable/communicator/self.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/step.hpp>
#include <joinable/tensor/variant.hpp>

namespace {

using namespace joinable_tests;
using joinable::AnyView;

using OneOf = std::variant<std::vector<float>, std::vector<double>>;
static_assert(joinable::WritableTensor<OneOf>);
static_assert(joinable::Tensor<OneOf const> && !joinable::WritableTensor<OneOf const>);
using OneOfViews = std::variant<std::span<float>, joinable::StridedView<double>>;
static_assert(joinable::WritableTensor<OneOfViews const>);
using OneIsRead = std::variant<std::vector<float>, std::span<double const>>;
static_assert(joinable::Tensor<OneIsRead> && !joinable::WritableTensor<OneIsRead>);
static_assert(!joinable::Tensor<std::variant<std::vector<float>, std::string>>);

TEST_CASE("a variant of tensors is the tensor that it holds") {
    OneOf tensor{std::vector<float>(3)};
    CHECK(joinable::dtype(tensor) == joinable::DType::f32);
    tensor = std::vector<double>(2);
    CHECK(joinable::dtype(tensor) == joinable::DType::f64);
    CHECK(joinable::extents(tensor) == joinable::Shape{2});
    CHECK(joinable::to_buffer(tensor).data == std::get<1>(tensor).data());

    std::vector<double> storage(6);
    OneOfViews const view{joinable::as_strided(storage, {3}, {2})};
    CHECK(joinable::strides(view) == joinable::Shape{2});
    joinable::DeviceId const device{joinable::DeviceKind::cuda, 2};
    std::variant<AnyView> const away{AnyView{storage.data(), joinable::DType::f64, {6}, {1}, device}
    };
    CHECK(joinable::device(away) == device);
}

/// One whose adapter says more than where its elements are.
struct Mask {
    std::vector<unsigned char> elements;
    std::size_t step = 1;
};

} // namespace

template <>
struct joinable::tensor_traits<Mask> {
    using value_type = unsigned char;
    static constexpr bool is_column_major = true;
    static unsigned char* data(Mask& t) { return t.elements.data(); }
    static unsigned char const* data(Mask const& t) { return t.elements.data(); }
    static std::array<std::size_t, 2> extents(Mask const&) { return {{2, 3}}; }
    static std::array<std::size_t, 2> strides(Mask const& t) { return {{t.step, 2 * t.step}}; }
    static std::size_t storage_bytes(Mask const& t) { return t.elements.size(); }
    static void check_reduction(Mask const&, ReduceOp op) {
        if (op == ReduceOp::sum) {
            throw ContractViolation{"a mask has no sum"};
        }
    }
};

namespace {

TEST_CASE("what the traits of a tensor check is checked in a variant, too") {
    std::variant<Mask, std::vector<float>> tensor{Mask{std::vector<unsigned char>(6, 1)}};
    std::variant<Mask> only{std::get<0>(tensor)};
    joinable::SelfCommunicator comm;
    CHECK_THROWS_WITH(
        joinable::all_reduce(comm, only, joinable::ReduceOp::sum).wait(), "a mask has no sum"
    );
    joinable::all_reduce(comm, only, joinable::ReduceOp::bit_or).wait(); // dense in its own order
    CHECK(AnyView{tensor}.numel() == 6);
    std::get<0>(tensor).step = 4; // as if in bytes
    CHECK_THROWS_AS(AnyView{tensor}, joinable::ContractViolation);
    tensor = std::vector<float>(2);
    CHECK(AnyView{tensor}.numel() == 2);
    joinable::all_reduce(comm, tensor, joinable::ReduceOp::sum).wait();
}

/// How a parameter is kept: as a type of its own, ...
template <class T>
struct Typed {
    std::vector<T> value;
    std::vector<T> grad;
};
/// ... as one type that holds either, ...
struct Held {
    OneOf value;
    OneOf grad;
};
/// ... or behind a base class.
struct Layer {
    Layer() = default;
    Layer(Layer const&) = delete;
    Layer& operator=(Layer const&) = delete;
    virtual ~Layer() = default;
    virtual AnyView value() = 0;
    virtual AnyView grad() = 0;
};
template <class T>
struct LayerOf : Layer {
    explicit LayerOf(std::size_t size) : numbers{std::vector<T>(size), std::vector<T>(size)} {}
    AnyView value() override { return AnyView{numbers.value}; }
    AnyView grad() override { return AnyView{numbers.grad}; }
    Typed<T> numbers;
};

} // namespace

template <>
struct joinable::parameter_traits<Layer> {
    static std::optional<AnyView> value(Layer& layer) { return layer.value(); }
    static std::optional<AnyView> grad(Layer& layer) { return layer.grad(); }
};

namespace {

/// Calls f(value, gradient) of each element, with its type.
template <class F>
void for_each(joinable::AnyParameter const& parameter, F const& f) {
    auto const call = [&]<class T>(T) {
        auto const value = parameter.value().as<T>();
        auto const grad = parameter.grad().as<T>();
        for (std::size_t i = 0; i < value.numel(); ++i) {
            f(value(i), grad(i));
        }
    };
    if (parameter.value().dtype() == joinable::DType::f32) {
        call(0.0F);
    } else {
        call(0.0);
    }
}

/// Rank r has r + 1 batches. Returns the values.
template <class Model>
std::vector<double> train(RankCommunicator& comm, Model&& model) {
    joinable::ParameterList const list = joinable::parameters(model);
    joinable::DistributedDataParallel ddp{
        comm, list, {.bucket_cap_bytes = 24, .first_bucket_bytes = 8}
    };
    joinable::Step step{comm, [&] {
                            for (auto const& parameter : list) {
                                for_each(parameter, []<class T>(T& value, T& grad) {
                                    value -= grad;
                                    grad = 0;
                                });
                            }
                        }};
    joinable::Join guard{joinable::participants(ddp, step)};
    for (int batch = 0; batch <= comm.rank(); ++batch) {
        ddp.forward([] {});
        ddp.backward([&](auto ready) {
            for (std::size_t i = list.size(); i-- > 0;) {
                for_each(list[i], [&]<class T>(T& value, T& grad) {
                    grad += value / 3 - static_cast<T>(1 + comm.rank() + batch) / 7;
                });
                ready(i);
            }
        });
        step.step();
    }
    guard.finish();
    std::vector<double> values;
    for (auto const& parameter : list) {
        for_each(parameter, [&](auto value, auto) { values.push_back(value); });
    }
    return values;
}

TEST_CASE("tensors of several types train alike as ranges, as variants and behind a base class") {
    over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
        std::vector<Typed<float>> floats;
        std::vector<Typed<double>> doubles;
        std::vector<Held> held;
        std::vector<std::unique_ptr<Layer>> layers;
        auto const add = [&]<class T>(std::vector<Typed<T>>& typed, std::size_t size) {
            std::vector<T> const zeros(size);
            typed.push_back({zeros, zeros});
            held.push_back({zeros, zeros});
            layers.push_back(std::make_unique<LayerOf<T>>(size));
        };
        add(floats, 5);
        add(floats, 2);
        add(doubles, 3);
        add(doubles, 4);
        std::vector<double> const values = train(comm, joinable::parameters(floats, doubles));
        CHECK(values.size() == 14);
        CHECK(values[13] != 0.0);
        CHECK(train(comm, held) == values);
        CHECK(train(comm, layers) == values);
    });
}

} // namespace
