// SPDX-License-Identifier: BSL-1.0
#include <joinable/interop/xtensor.hpp>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <support/engines.hpp>
#include <support/ranks.hpp>
#include <xtensor/xadapt.hpp>
#include <xtensor/xarray.hpp>
#include <xtensor/xfixed.hpp>
#include <xtensor/xindex_view.hpp>
#include <xtensor/xmanipulation.hpp>
#include <xtensor/xstrided_view.hpp>
#include <xtensor/xtensor.hpp>
#include <xtensor/xview.hpp>

#include <joinable/communicator/collectives.hpp>
#include <joinable/tensor/any_view.hpp>

namespace {

using joinable::DType;
using joinable::Shape;
using joinable::Tensor;
using joinable::WritableTensor;
using joinable_tests::run_ranks;
using Array = xt::xarray<float>;
using Columns = xt::xtensor<double, 2, xt::layout_type::column_major>;

static_assert(joinable::dtype_of<joinable::tensor_traits<Array>::value_type> == DType::f32);
static_assert(joinable::dtype_of<joinable::tensor_traits<Columns>::value_type> == DType::f64);
static_assert(
    joinable::dtype_of<joinable::tensor_traits<xt::xarray<std::int32_t>>::value_type> == DType::i32
);
static_assert(Tensor<xt::xarray<bool>> && !Tensor<xt::xarray<long double>>);

template <class T>
T& lvalue();
static_assert(WritableTensor<Array> && Tensor<Array const> && !WritableTensor<Array const>);
static_assert(!WritableTensor<decltype(xt::view(lvalue<Array const>(), 0))>);
static_assert(!Tensor<decltype(lvalue<Array>() + lvalue<Array>())>);
static_assert(!Tensor<decltype(xt::view(lvalue<Array>() + lvalue<Array>(), 0))>);
static_assert(!Tensor<decltype(xt::view(lvalue<Array>(), xt::keep(0, 2)))>);

struct Layer {
    xt::xtensor<float, 2> value, grad;
};
static_assert(joinable::models_parameter<Layer>());

template <class T>
void check_layout(T&& array, Shape const& extents, Shape const& strides) {
    std::vector<void const*> elements;
    for (auto i = array.template begin<xt::layout_type::row_major>();
         elements.size() < array.size();
         ++i) {
        elements.push_back(&*i);
    }
    joinable_tests::check_layout(joinable::AnyView{array}, extents, strides, elements);
}

TEST_CASE("an array and a view of one have the extents and strides that xtensor gives them") {
    Array array = xt::zeros<float>({4, 3});
    Columns columns = xt::zeros<double>({4, 3});
    std::vector<int> memory(6);
    check_layout(array, {4, 3}, {3, 1});
    check_layout(columns, {4, 3}, {1, 4});
    check_layout(xt::xtensor_fixed<float, xt::xshape<2, 3>>(), {2, 3}, {3, 1});
    check_layout(xt::adapt(memory, std::array<std::size_t, 2>{2, 3}), {2, 3}, {3, 1});
    check_layout(xt::view(array, 2), {3}, {1});
    check_layout(xt::view(array, xt::all(), 1), {4}, {3});
    check_layout(xt::view(columns, xt::range(1, 3), xt::all()), {2, 3}, {1, 4});
    check_layout(xt::view(array, xt::range(0, 4, 2), xt::range(1, 3)), {2, 2}, {6, 1});
    check_layout(xt::transpose(array), {3, 4}, {1, 3});
    check_layout(xt::strided_view(array, {xt::ellipsis(), 2}), {4}, {3});
    check_layout(xt::xtensor<double, 1>::from_shape({1}), {1}, {0}); // the stride of one element
}

TEST_CASE("a view that goes backwards is refused") {
    xt::xtensor<float, 1> const array = xt::zeros<float>({4});
    CHECK_THROWS_AS(
        (void)joinable::to_const_buffer(xt::view(array, xt::range(3, 0, -1))),
        joinable::ContractViolation
    );
}

/// An array of rank r, whose elements are all different.
template <class T>
T of_rank(int rank) {
    T array = T::from_shape({3, 2});
    for (std::size_t i = 0; i < 6; ++i) {
        array(i / 2, i % 2) =
            static_cast<typename T::value_type>(i + 10 * static_cast<std::size_t>(rank));
    }
    return array;
}

template <class T>
void check_collectives(joinable::ThreadCommunicator& comm) {
    T serial = of_rank<T>(0);
    for (int rank = 1; rank < comm.size(); ++rank) {
        serial += of_rank<T>(rank);
    }
    T array = of_rank<T>(comm.rank());
    joinable::all_reduce(comm, array).wait();
    CHECK(array == serial);

    array = of_rank<T>(comm.rank());
    joinable::broadcast(comm, array, comm.size() - 1).wait();
    CHECK(array == of_rank<T>(comm.size() - 1));
}

TEST_CASE("collectives take arrays of either layout, and give what xtensor sums serially") {
    run_ranks({1, 2, 3, 4, 8}, [](joinable::ThreadCommunicator& comm) {
        check_collectives<Array>(comm);
        check_collectives<Columns>(comm);
        check_collectives<xt::xtensor<int, 2>>(comm);
    });
}

TEST_CASE("collectives take the views that have no gaps, and refuse the others") {
    run_ranks({1, 2, 3, 4, 8}, [](joinable::ThreadCommunicator& comm) {
        xt::xtensor<double, 2> array = xt::ones<double>({3, 4});
        joinable::all_reduce(comm, xt::view(array, xt::range(1, 3), xt::all())).wait();
        xt::xtensor<double, 2> expected = xt::ones<double>({3, 4});
        xt::view(expected, xt::range(1, 3), xt::all()) = comm.size();
        CHECK(array == expected);
        CHECK_THROWS_AS(
            (void)joinable::all_reduce(comm, xt::view(array, xt::all(), 0)),
            joinable::ContractViolation
        );
        comm.barrier();
    });
}

template <class Value>
struct Weight {
    Value value, grad;
};

auto part_of(Columns& large, int column) {
    return xt::view(large, xt::range(1, 3), xt::range(column, column + 4));
}

/// Its parameters are an array, a tensor of one dimension, a part of a larger column-major tensor, and a tensor
/// of fixed size.
class Net : public joinable_tests::EngineNet {
public:
    Net() {
        for (std::size_t i = 0; i < 4; ++i) {
            b_.value(i) = start(i, 0);
            for (std::size_t j = 0; j < 3; ++j) {
                w_.value(i, j) = start(i, j);
            }
        }
        for (std::size_t i = 0; i < 2; ++i) {
            c_.value(i) = start(i, 0);
            for (std::size_t j = 0; j < 4; ++j) {
                v_.value(i, j) = start(i, j);
            }
        }
    }
    joinable::ParameterList parameters() override { return joinable::parameters(w_, b_, v_, c_); }
    void backward(std::vector<int> const& samples) override {
        w_.grad.fill(0);
        b_.grad.fill(0);
        v_.grad.fill(0);
        c_.grad.fill(0);
        for (int const sample : samples) {
            auto const x = [&](std::size_t k) {
                return joinable_tests::engine_input(sample, static_cast<int>(k));
            };
            std::array<double, 4> h{};
            for (std::size_t j = 0; j < 4; ++j) {
                double sum = b_.value(j);
                for (std::size_t k = 0; k < 3; ++k) {
                    sum += w_.value(j, k) * x(k);
                }
                h[j] = std::tanh(sum);
            }
            std::array<double, 4> dh{};
            for (std::size_t i = 0; i < 2; ++i) {
                double y = c_.value(i);
                for (std::size_t j = 0; j < 4; ++j) {
                    y += v_.value(i, j) * h[j];
                }
                double const dy = (y - joinable_tests::engine_target(sample, static_cast<int>(i))) /
                                  static_cast<double>(samples.size());
                c_.grad(i) += dy;
                for (std::size_t j = 0; j < 4; ++j) {
                    v_.grad(i, j) += dy * h[j];
                    dh[j] += dy * v_.value(i, j) * (1 - h[j] * h[j]);
                }
            }
            for (std::size_t j = 0; j < 4; ++j) {
                b_.grad(j) += dh[j];
                for (std::size_t k = 0; k < 3; ++k) {
                    w_.grad(j, k) += dh[j] * x(k);
                }
            }
        }
    }
    void descend(double rate) override {
        w_.value -= rate * w_.grad;
        b_.value -= rate * b_.grad;
        v_.value -= rate * v_.grad;
        c_.value -= rate * c_.grad;
    }
    [[nodiscard]] std::vector<double> numbers() const override {
        std::vector<double> all;
        auto const append = [&](auto const& value) {
            all.insert(all.end(), value.begin(), value.end());
        };
        append(w_.value);
        append(b_.value);
        append(v_.value);
        append(c_.value);
        return all;
    }

private:
    static double start(std::size_t i, std::size_t j) {
        return joinable_tests::engine_start(static_cast<int>(i), static_cast<int>(j));
    }

    Columns large_ = xt::zeros<double>({4, 9});
    Weight<xt::xarray<double>> w_{xt::zeros<double>({4, 3}), xt::zeros<double>({4, 3})};
    Weight<xt::xtensor<double, 1>> b_{xt::zeros<double>({4}), xt::zeros<double>({4})};
    Weight<decltype(part_of(lvalue<Columns>(), 0))> v_{part_of(large_, 0), part_of(large_, 5)};
    Weight<xt::xtensor_fixed<double, xt::xshape<2>>> c_{};
};

TEST_CASE("a network of xtensor trains over uneven inputs as one does on the union of them") {
    joinable_tests::check_training([] { return std::make_unique<Net>(); });
}

} // namespace
