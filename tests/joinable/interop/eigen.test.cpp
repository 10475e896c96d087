// SPDX-License-Identifier: BSL-1.0
#include <joinable/interop/eigen.hpp>

#include <array>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include <doctest/doctest.h>
#include <support/engines.hpp>
#include <support/ranks.hpp>

#include <joinable/communicator/collectives.hpp>
#include <joinable/tensor/any_view.hpp>

namespace {

using Eigen::MatrixXd;
using Eigen::MatrixXf;
using joinable::DType;
using joinable::Shape;
using joinable::Tensor;
using joinable::WritableTensor;
using joinable_tests::run_ranks;
using RowMatrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using AnyStride = Eigen::Stride<Eigen::Dynamic, Eigen::Dynamic>;

template <class Scalar>
constexpr DType dtype_in =
    joinable::dtype_of<typename joinable::tensor_traits<Eigen::Array<Scalar, 2, 2>>::value_type>;

static_assert(dtype_in<double> == DType::f64 && dtype_in<float> == DType::f32);
static_assert(dtype_in<std::int32_t> == DType::i32 && dtype_in<std::uint8_t> == DType::u8);
static_assert(dtype_in<Eigen::half> == DType::f16 && dtype_in<Eigen::bfloat16> == DType::bf16);
static_assert(Tensor<Eigen::MatrixXcf> && Tensor<Eigen::Array<bool, 2, 2>>);
static_assert(!Tensor<Eigen::Matrix<long double, 2, 2>>);

static_assert(WritableTensor<MatrixXf> && Tensor<MatrixXf const> && !WritableTensor<MatrixXf const>);
static_assert(!WritableTensor<Eigen::Map<MatrixXf const>> && Tensor<Eigen::Ref<MatrixXf const>>);
static_assert(WritableTensor<Eigen::Ref<MatrixXf>>);

/// An engine's own class.
struct Named : MatrixXf {
    using MatrixXf::Matrix;
};
static_assert(WritableTensor<Named>);

using Sum = decltype(std::declval<MatrixXf&>() + std::declval<MatrixXf&>());
static_assert(!Tensor<Sum> && !Tensor<decltype(std::declval<Sum&>().transpose())>);
static_assert(!Tensor<decltype(std::declval<Sum&>().row(0))>);

struct Layer {
    MatrixXf value, grad;
};
static_assert(joinable::models_parameter<Layer>());

template <class T>
void check_layout(T&& matrix, Shape const& extents, Shape const& strides) {
    std::vector<void const*> elements;
    for (Eigen::Index i = 0; i < matrix.rows(); ++i) {
        for (Eigen::Index j = 0; j < matrix.cols(); ++j) {
            elements.push_back(&matrix.coeffRef(i, j));
        }
    }
    joinable_tests::check_layout(joinable::AnyView{matrix}, extents, strides, elements);
}

TEST_CASE("a matrix, a part of one and a map have the extents and strides that Eigen gives them") {
    MatrixXf columns(4, 3);
    RowMatrix rows(4, 3);
    Eigen::Matrix<int, 2, 3> fixed;
    Eigen::Vector4d vector;
    check_layout(columns, {4, 3}, {1, 4});
    check_layout(rows, {4, 3}, {3, 1});
    check_layout(fixed, {2, 3}, {1, 2});
    check_layout(vector, {4}, {1});
    check_layout(Eigen::RowVectorXf(3), {3}, {1});
    check_layout(Eigen::ArrayXXd(2, 5), {2, 5}, {1, 2});
    check_layout(columns.block(1, 0, 2, 3), {2, 3}, {1, 4});
    check_layout(rows.block<2, 2>(1, 1), {2, 2}, {3, 1});
    check_layout(columns.row(2), {3}, {4});
    check_layout(columns.col(2), {4}, {1});
    check_layout(rows.col(1), {4}, {3});
    check_layout(vector.segment(1, 2), {2}, {1});
    check_layout(columns.transpose(), {3, 4}, {4, 1});
    check_layout(columns.diagonal(), {3}, {5});
    std::vector<double> memory(24);
    check_layout(Eigen::Map<RowMatrix>(memory.data(), 6, 4), {6, 4}, {4, 1});
    check_layout(
        Eigen::Map<MatrixXd, 0, AnyStride>(memory.data(), 2, 3, AnyStride{8, 3}), {2, 3}, {3, 8}
    );
    check_layout(Eigen::Ref<MatrixXf, 0, Eigen::OuterStride<>>(columns.topRows(2)), {2, 3}, {1, 4});
    check_layout(MatrixXf(0, 3), {0, 3}, {1, 0});
}

TEST_CASE("steps that go backwards are refused") {
    std::array<double, 6> memory{};
    Eigen::Map<MatrixXd, 0, AnyStride> const map{memory.data() + 5, 2, 3, AnyStride{-2, -1}};
    CHECK_THROWS_AS((void)joinable::to_const_buffer(map), joinable::ContractViolation);
}

/// A matrix of rank r, whose elements are all different.
template <class Matrix>
Matrix of_rank(int rank) {
    Matrix matrix(3, 2);
    for (Eigen::Index i = 0; i < 6; ++i) {
        matrix(i % 3, i / 3) = static_cast<typename Matrix::Scalar>(10 * rank + i);
    }
    return matrix;
}

template <class Matrix>
void check_collectives(joinable::ThreadCommunicator& comm) {
    Matrix serial = of_rank<Matrix>(0);
    for (int rank = 1; rank < comm.size(); ++rank) {
        serial += of_rank<Matrix>(rank);
    }
    auto matrix = of_rank<Matrix>(comm.rank());
    joinable::all_reduce(comm, matrix).wait();
    CHECK(matrix == serial);

    matrix = of_rank<Matrix>(comm.rank());
    joinable::broadcast(comm, matrix, comm.size() - 1).wait();
    CHECK(matrix == of_rank<Matrix>(comm.size() - 1));
}

TEST_CASE("collectives take matrices of either storage order, and give what Eigen sums serially") {
    run_ranks({1, 2, 3, 4, 8}, [](joinable::ThreadCommunicator& comm) {
        check_collectives<MatrixXf>(comm);
        check_collectives<RowMatrix>(comm);
        check_collectives<Eigen::Matrix<int, 3, 2>>(comm);
        check_collectives<Eigen::MatrixXd>(comm);
    });
}

TEST_CASE("collectives take the parts of a matrix that have no gaps, and refuse the others") {
    run_ranks({1, 2, 3, 4, 8}, [](joinable::ThreadCommunicator& comm) {
        MatrixXd matrix = MatrixXd::Constant(3, 4, 1.0);
        joinable::all_reduce(comm, matrix.middleCols(1, 2)).wait();
        joinable::all_reduce(comm, matrix.col(3).tail(2)).wait();
        MatrixXd expected = MatrixXd::Constant(3, 4, comm.size());
        expected.col(0).setOnes();
        expected(0, 3) = 1;
        CHECK(matrix == expected);

        CHECK_THROWS_AS(
            (void)joinable::all_reduce(comm, matrix.row(0)), joinable::ContractViolation
        );
        CHECK_THROWS_AS(
            (void)joinable::all_reduce(comm, matrix.topRows(2)), joinable::ContractViolation
        );
        comm.barrier();
    });
}

template <class Value>
struct Weight {
    Value value, grad;
};

/// Its parameters are a column-major matrix, a vector, a part of a larger row-major matrix, and a vector of fixed
/// size.
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
        auto const n = static_cast<Eigen::Index>(samples.size());
        MatrixXd x(3, n);
        MatrixXd t(2, n);
        for (int s = 0; s < n; ++s) {
            for (int k = 0; k < 3; ++k) {
                x(k, s) = joinable_tests::engine_input(samples[static_cast<std::size_t>(s)], k);
            }
            for (int k = 0; k < 2; ++k) {
                t(k, s) = joinable_tests::engine_target(samples[static_cast<std::size_t>(s)], k);
            }
        }
        // Lazy products are slow, and quick to compile.
        // Lazy products are slow, and quick to compile.
        MatrixXd const h = (w_.value.lazyProduct(x).colwise() + b_.value).array().tanh();
        MatrixXd const dy =
            ((v_.value.lazyProduct(h).colwise() + c_.value) - t) / static_cast<double>(n);
        MatrixXd const dh = v_.value.transpose().lazyProduct(dy).array() * (1 - h.array().square());
        v_.grad = dy.lazyProduct(h.transpose());
        c_.grad = dy.rowwise().sum();
        w_.grad = dh.lazyProduct(x.transpose());
        b_.grad = dh.rowwise().sum();
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
            for (auto const row : value.rowwise()) {
                all.insert(all.end(), row.begin(), row.end());
            }
        };
        append(w_.value);
        append(b_.value);
        append(v_.value);
        append(c_.value);
        return all;
    }

private:
    static void fill(auto& value) {
        for (int i = 0; i < value.rows(); ++i) {
            for (int j = 0; j < value.cols(); ++j) {
                value(i, j) = joinable_tests::engine_start(i, j);
            }
        }
    }

    RowMatrix large_ = RowMatrix::Zero(4, 9);
    Weight<MatrixXd> w_{MatrixXd(4, 3), MatrixXd::Zero(4, 3)};
    Weight<Eigen::VectorXd> b_{Eigen::VectorXd(4), Eigen::VectorXd::Zero(4)};
    Weight<Eigen::Block<RowMatrix>> v_{large_.block(0, 1, 2, 4), large_.block(2, 5, 2, 4)};
    Weight<Eigen::Vector2d> c_{Eigen::Vector2d(), Eigen::Vector2d::Zero()};
};

TEST_CASE("a network of Eigen trains over uneven inputs as one does on the union of them") {
    joinable_tests::check_training([] { return std::make_unique<Net>(); });
}

} // namespace
