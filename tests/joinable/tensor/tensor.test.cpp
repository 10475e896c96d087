// SPDX-License-Identifier: BSL-1.0
#include <joinable/tensor/tensor.hpp>

#include <array>
#include <concepts>
#include <cstddef>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <joinable/bucket/tensor_size.hpp>
#include <joinable/communicator/collectives.hpp>
#include <joinable/communicator/self.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/overlap.hpp>
#include <joinable/tensor/strided_view.hpp>

/// An engine whose functions for its tensors have the names of joinable's.
namespace engine_of_tensor_test {

struct Tensor {
    std::array<float, 6> numbers;
};
void extents(Tensor const&);
void strides(Tensor const&);
void numel(Tensor const&);
void dtype(Tensor const&);
void device(Tensor const&);
void is_contiguous(Tensor const&);
void to_buffer(Tensor&);
void to_const_buffer(Tensor const&);

} // namespace engine_of_tensor_test

namespace {

using joinable::ContractViolation;
using joinable::DType;
using joinable::Shape;

static_assert(joinable::WritableTensor<std::vector<double>>);
static_assert(!joinable::WritableTensor<std::vector<double> const>);
static_assert(joinable::WritableTensor<std::array<float, 2>>);
static_assert(joinable::Tensor<std::array<int, 3> const>);
static_assert(!joinable::WritableTensor<std::array<int, 3> const>);
static_assert(joinable::WritableTensor<std::span<float> const>);
static_assert(joinable::Tensor<std::span<float const>>);
static_assert(!joinable::WritableTensor<std::span<float const>>);
static_assert(!joinable::Tensor<std::vector<bool>>);
static_assert(!joinable::Tensor<std::vector<std::string>>);
static_assert(!joinable::Tensor<int>);

/// A family of an engine's classes, as Armadillo's matrices: what is adapted is all that its base has.
template <class T>
struct Mat {
    using elem_type = T;
    std::size_t rows;
    std::size_t columns;
    std::vector<T> numbers = std::vector<T>(rows * columns);
};
template <class T>
struct Col : Mat<T> {
    explicit Col(std::size_t count) : Mat<T>{count, 1} {}
};
struct NamedCol : Col<double> {
    using Col<double>::Col;
};

/// A family whose base is a tensor already.
struct Row : std::vector<double> {
    using std::vector<double>::vector;
};

/// An engine's tensor that counts in signed numbers, as many do.
struct Signed {
    std::vector<long> extents;
    std::vector<long> strides;
    double* data = nullptr;
};

/// An engine's matrix whose columns lie one after another, or apart.
struct Columns {
    std::array<std::size_t, 2> extents;
    std::size_t step = extents[0];
    std::vector<int> numbers = std::vector<int>(step * extents[1]);
};

/// What an engine computes only when it is read.
struct Lazy {};

} // namespace

template <class T>
    requires std::derived_from<T, Mat<typename T::elem_type>>
struct joinable::tensor_traits<T> {
    using value_type = typename T::elem_type;
    static auto* data(auto& t) { return t.numbers.data(); }
    static auto extents(T const& t) { return std::array{t.rows, t.columns}; }
};

template <class T>
    requires std::derived_from<T, std::vector<double>>
struct joinable::tensor_traits<T> {
    using value_type = double;
    static auto* data(auto& t) { return t.data(); }
    static auto extents(T const& t) { return std::array{std::size_t{1}, t.size()}; }
};

template <>
struct joinable::tensor_traits<Signed> {
    static DType dtype(Signed const&) { return DType::f64; }
    static void* data(Signed& t) { return t.data; }
    static void const* data(Signed const& t) { return t.data; }
    static std::vector<long> const& extents(Signed const& t) { return t.extents; }
    static std::vector<long> const& strides(Signed const& t) { return t.strides; }
    static DeviceId device(Signed const&) { return {DeviceKind::cuda, 3}; }
};

template <>
struct joinable::tensor_traits<Columns> {
    using value_type = int;
    static constexpr bool is_column_major = true;
    static auto* data(auto& t) { return t.numbers.data(); }
    static auto extents(Columns const& t) { return t.extents; }
    static auto strides(Columns const& t) { return std::array{std::size_t{1}, t.step}; }
};

namespace {

template <class T>
struct DenseColumns : Mat<T> {};

} // namespace

template <class T>
struct joinable::tensor_traits<DenseColumns<T>> : joinable::tensor_traits<Mat<T>> {
    static constexpr bool is_column_major = true;
};

template <>
struct joinable::tensor_traits<engine_of_tensor_test::Tensor> {
    using value_type = float;
    static auto* data(auto& t) { return t.numbers.data(); }
    static auto extents(engine_of_tensor_test::Tensor const&) { return std::array{2, 3}; }
    static auto strides(engine_of_tensor_test::Tensor const&) { return std::array{3, 1}; }
};

template <>
struct joinable::tensor_traits<Lazy> {
    static constexpr bool is_expression = true;
};

namespace {

TEST_CASE("containers and spans are host tensors of one dimension") {
    std::vector<float> vector(3);
    std::array<int, 4> array{};
    CHECK(joinable::extents(vector) == Shape{3});
    CHECK(joinable::strides(vector) == Shape{1});
    CHECK(joinable::dtype(vector) == DType::f32);
    CHECK(joinable::device(vector) == joinable::DeviceId{});
    CHECK(joinable::numel(array) == 4);
    CHECK(joinable::dtype(array) == DType::i32);
    CHECK(joinable::dtype(std::span<double const>{}) == DType::f64);
    CHECK(joinable::to_buffer(array).data == array.data());
}

static_assert(joinable::WritableTensor<Mat<float>> && joinable::WritableTensor<Col<float>>);
static_assert(joinable::WritableTensor<NamedCol> && !joinable::WritableTensor<NamedCol const>);
static_assert(!joinable::Tensor<Mat<std::string>>);

TEST_CASE("a constrained specialisation adapts a base class and all that is derived from it") {
    NamedCol column{3};
    CHECK(joinable::extents(column) == Shape{3, 1});
    CHECK(joinable::dtype(Col<float>{2}) == DType::f32);
    CHECK(joinable::to_buffer(column).data == column.numbers.data());
}

TEST_CASE("the traits of the library stay those of a base that a constrained specialisation covers"
) {
    CHECK(joinable::extents(std::vector<double>(3)) == Shape{3});
    CHECK(joinable::extents(Row(3)) == Shape{1, 3});
}

TEST_CASE("a tensor that counts in signed numbers is read as it is") {
    std::vector<double> storage(12);
    Signed tensor{{4, 3}, {3, 1}, storage.data()};
    CHECK(joinable::numel(tensor) == 12);
    CHECK(joinable::dtype(tensor) == DType::f64);
    CHECK(joinable::device(tensor).index == 3);
    CHECK(joinable::to_buffer(tensor).data == storage.data());
    CHECK(joinable::to_const_buffer(tensor).bytes() == 96);
}

TEST_CASE("negative or missing extents and strides are refused with what was given") {
    CHECK_THROWS_WITH_AS(
        (void)joinable::numel(Signed{{4, -1}, {1, 1}}),
        "an extent or a stride of a tensor is -1, but must not be negative",
        ContractViolation
    );
    CHECK_THROWS_AS((void)joinable::strides(Signed{{4}, {-1}}), ContractViolation);
    CHECK_THROWS_WITH_AS(
        (void)joinable::strides(Signed{{4, 3}, {1}}),
        "a tensor has 2 extents but 1 strides; give one for each",
        ContractViolation
    );
}

TEST_CASE("a collective's buffer is taken from a contiguous tensor only") {
    std::vector<float> storage(6);
    CHECK(joinable::to_buffer(storage).count == 6);
    auto const column = joinable::as_strided(storage, {3}, {2});
    CHECK_THROWS_AS((void)joinable::to_buffer(column), ContractViolation);
}

TEST_CASE("a tensor of a column-major type gives its buffer column by column") {
    Columns tensor{{3, 2}};
    CHECK(joinable::is_contiguous(tensor));
    CHECK(joinable::to_buffer(tensor).data == tensor.numbers.data());
    CHECK(joinable::to_const_buffer(tensor).count == 6);
    CHECK_THROWS_AS((void)joinable::to_buffer(Columns{{3, 2}, 4}), ContractViolation);
    CHECK(joinable::to_buffer(Columns{{3, 1}, 4}).count == 3); // one column has no gap
    // A view has no type that says so: on another rank it might be row-major.
    CHECK_THROWS_AS((void)joinable::to_buffer(joinable::AnyView{tensor}), ContractViolation);
}

TEST_CASE("a column-major tensor without strides of its own is dense") {
    DenseColumns<float> const tensor{{3, 2}};
    CHECK(joinable::strides(tensor) == Shape{1, 3});
    CHECK(joinable::to_const_buffer(tensor).data == tensor.numbers.data());
}

TEST_CASE("functions of an engine's namespace are never called for joinable's of the same name") {
    engine_of_tensor_test::Tensor tensor{};
    joinable::SelfCommunicator comm;
    joinable::all_reduce(comm, tensor).wait();
    CHECK(joinable::to_buffer(tensor).count == 6);
    CHECK(joinable::to_const_buffer(tensor).dtype == DType::f32);
    CHECK(joinable::numel(tensor) == 6);
    CHECK_FALSE(joinable::is_overlapping(tensor));
    CHECK(joinable::detail::tensor_size_of(tensor).numel == 6);
    CHECK(joinable::share_memory(tensor, tensor));
}

static_assert(!joinable::Tensor<Lazy> && joinable::detail::is_expression<Lazy>);

} // namespace
