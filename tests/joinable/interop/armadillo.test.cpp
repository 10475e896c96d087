// SPDX-License-Identifier: BSL-1.0
#include <joinable/interop/armadillo.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <support/engines.hpp>
#include <support/ranks.hpp>

#include <joinable/communicator/collectives.hpp>
#include <joinable/tensor/any_view.hpp>

namespace {

using joinable::DType;
using joinable::Shape;
using joinable::Tensor;
using joinable::WritableTensor;
using joinable_tests::run_ranks;

static_assert(joinable::dtype_of<joinable::tensor_traits<arma::fmat>::value_type> == DType::f32);
static_assert(joinable::dtype_of<joinable::tensor_traits<arma::umat>::value_type> == DType::u64);
static_assert(
    joinable::dtype_of<joinable::tensor_traits<arma::Mat<std::int32_t>>::value_type> == DType::i32
);
static_assert(Tensor<arma::cx_mat> && Tensor<arma::Mat<short>> && !Tensor<arma::sp_mat>);

static_assert(WritableTensor<arma::mat> && Tensor<arma::mat const>);
static_assert(!WritableTensor<arma::mat const> && !WritableTensor<arma::cube const>);
static_assert(WritableTensor<arma::vec> && WritableTensor<arma::rowvec::fixed<3>>);
static_assert(WritableTensor<arma::subview<float>>);
static_assert(!WritableTensor<arma::subview<float> const>); // what a const matrix gives

using Sum = decltype(std::declval<arma::mat&>() + std::declval<arma::mat&>());
static_assert(!Tensor<Sum> && !Tensor<decltype(std::declval<arma::mat&>().t())>);

struct Layer {
    arma::fmat value, grad;
};
static_assert(joinable::models_parameter<Layer>());

template <class T>
void check_layout(T&& matrix, Shape const& extents, Shape const& strides) {
    std::vector<void const*> elements;
    for (arma::uword i = 0; i < matrix.n_rows; ++i) {
        for (arma::uword j = 0; j < matrix.n_cols; ++j) {
            if constexpr (requires { matrix.n_slices; }) {
                for (arma::uword k = 0; k < matrix.n_slices; ++k) {
                    elements.push_back(&matrix(i, j, k));
                }
            } else {
                elements.push_back(&matrix(i, j));
            }
        }
    }
    joinable_tests::check_layout(joinable::AnyView{matrix}, extents, strides, elements);
}

TEST_CASE("a matrix, a cube and a part of one have Armadillo's extents and lie column by column") {
    arma::fmat matrix(4, 3);
    arma::Row<int> row(5);
    arma::cube cube(4, 3, 2);
    check_layout(matrix, {4, 3}, {1, 4});
    check_layout(arma::mat::fixed<2, 3>(), {2, 3}, {1, 2});
    check_layout(arma::vec(4), {4}, {1});
    check_layout(row, {5}, {1});
    check_layout(cube, {4, 3, 2}, {1, 4, 12});
    check_layout(matrix.submat(1, 0, 2, 2), {2, 3}, {1, 4});
    check_layout(matrix.row(2), {3}, {4});
    check_layout(matrix.col(2), {4}, {1});
    check_layout(matrix.cols(1, 2), {4, 2}, {1, 4});
    check_layout(row.cols(1, 3), {3}, {1});
    check_layout(cube.slice(1), {4, 3}, {1, 4});
    check_layout(cube.tube(1, 1, 2, 2), {2, 2, 2}, {1, 4, 12});
    check_layout(arma::mat(0, 3), {0, 3}, {1, 0});
}

/// A matrix, or a cube, of rank r, whose elements are all different.
template <class T>
T of_rank(T tensor, int rank) {
    for (arma::uword i = 0; i < tensor.n_elem; ++i) {
        tensor(i) = static_cast<typename T::elem_type>(i + 10 * static_cast<arma::uword>(rank));
    }
    return tensor;
}

template <class T>
void check_collectives(joinable::ThreadCommunicator& comm, T const& shape) {
    T serial = of_rank(shape, 0);
    for (int rank = 1; rank < comm.size(); ++rank) {
        serial += of_rank(shape, rank);
    }
    T tensor = of_rank(shape, comm.rank());
    joinable::all_reduce(comm, tensor).wait();
    CHECK(arma::all(arma::vectorise(tensor == serial)));

    tensor = of_rank(shape, comm.rank());
    joinable::broadcast(comm, tensor, comm.size() - 1).wait();
    CHECK(arma::all(arma::vectorise(tensor == of_rank(shape, comm.size() - 1))));
}

TEST_CASE("collectives give what Armadillo sums serially") {
    run_ranks({1, 2, 3, 4, 8}, [](joinable::ThreadCommunicator& comm) {
        check_collectives(comm, arma::fmat(3, 2));
        check_collectives(comm, arma::Row<int>(5));
        check_collectives(comm, arma::vec(4));
        check_collectives(comm, arma::cube(3, 2, 2));
    });
}

TEST_CASE("collectives take the columns of a matrix, and refuse rows, which have gaps") {
    run_ranks({1, 2, 3, 4, 8}, [](joinable::ThreadCommunicator& comm) {
        arma::mat matrix(3, 4, arma::fill::ones);
        joinable::all_reduce(comm, matrix.cols(1, 2)).wait();
        arma::mat expected(3, 4, arma::fill::ones);
        expected.cols(1, 2).fill(comm.size());
        CHECK(arma::approx_equal(matrix, expected, "absdiff", 0.0));
        CHECK_THROWS_AS(
            (void)joinable::all_reduce(comm, matrix.row(0)), joinable::ContractViolation
        );
        comm.barrier();
    });
}

template <class Value>
struct Weight {
    Value value, grad;
};

/// Its parameters are a matrix, a column, a part of a larger matrix, and a column of fixed size.
class Net : public joinable_tests::EngineNet {
public:
    Net() {
        fill(w_.value);
        fill(b_.value);
        fill(v_.value);
        fill(c_.value);
    }
    joinable::ParameterList parameters() override { return joinable::parameters(w_, b_, v_, c_); }
    void backward(std::vector<int> const& samples) override {
        auto const n = static_cast<arma::uword>(samples.size());
        arma::mat x(3, n);
        arma::mat t(2, n);
        for (arma::uword s = 0; s < n; ++s) {
            for (int k = 0; k < 3; ++k) {
                x(static_cast<arma::uword>(k), s) = joinable_tests::engine_input(samples[s], k);
            }
            for (int k = 0; k < 2; ++k) {
                t(static_cast<arma::uword>(k), s) = joinable_tests::engine_target(samples[s], k);
            }
        }
        arma::mat const v{v_.value};
        arma::mat const wx = w_.value * x;
        arma::mat const h = arma::tanh(wx.each_col() + b_.value);
        arma::mat const vh = v * h;
        arma::mat const dy = ((vh.each_col() + c_.value) - t) / static_cast<double>(n);
        arma::mat const dh = (v.t() * dy) % (1 - arma::square(h));
        v_.grad = dy * h.t();
        c_.grad = arma::sum(dy, 1);
        w_.grad = dh * x.t();
        b_.grad = arma::sum(dh, 1);
    }
    void descend(double rate) override {
        w_.value -= rate * w_.grad;
        b_.value -= rate * b_.grad;
        v_.value -= rate * v_.grad;
        c_.value -= rate * c_.grad;
    }
    [[nodiscard]] std::vector<double> numbers() const override {
        std::vector<double> all;
        auto const append = [&](arma::mat const& value) {
            all.insert(all.end(), value.begin(), value.end());
        };
        append(w_.value);
        append(b_.value);
        append(arma::mat{v_.value});
        append(c_.value);
        return all;
    }

private:
    static void fill(auto&& value) {
        for (arma::uword i = 0; i < value.n_rows; ++i) {
            for (arma::uword j = 0; j < value.n_cols; ++j) {
                value(i, j) =
                    joinable_tests::engine_start(static_cast<int>(i), static_cast<int>(j));
            }
        }
    }

    arma::mat large_ = arma::mat(5, 8);
    Weight<arma::mat> w_{arma::mat(4, 3), arma::mat(4, 3)};
    Weight<arma::vec> b_{arma::vec(4), arma::vec(4)};
    Weight<arma::subview<double>> v_{
        large_.submat(1, 0, arma::size(2, 4)), large_.submat(3, 4, arma::size(2, 4))
    };
    Weight<arma::vec::fixed<2>> c_;
};

TEST_CASE("a network of Armadillo trains over uneven inputs as one does on the union of them") {
    joinable_tests::check_training([] { return std::make_unique<Net>(); });
}

} // namespace
