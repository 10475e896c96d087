// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <concepts>
#include <type_traits>

#include <Eigen/Core>

#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/traits.hpp>

/// @file
/// Eigen's dense matrices and arrays as tensors; in CMake, find_package(Eigen3). Opt-in: no other
/// header includes this one. No further code is needed:
/// ```cpp
/// struct Layer { Eigen::MatrixXf value, grad; };                  // a Parameter
/// joinable::all_reduce(comm, matrix.row(0)).wait();               // throws: a row has gaps; a column has none
/// ```
/// Takes Matrix, Array, Map, Ref, Block and other expressions with memory (`a.transpose()`,
/// `a.diagonal()`, `a.array()`). Extents are (rows, cols), or (size) for a vector. An expression
/// without memory, such as `a + b`, is refused with one sentence. Collectives take elements in
/// memory order, which is column by column by default: use the same storage order on all ranks.

namespace joinable { inline namespace v0 {

namespace detail {

template <class Derived>
typename Derived::Scalar eigen_scalar_of(Eigen::DenseBase<Derived> const&);

/// The type of elements of 16 bits in this library.
template <class Scalar>
using element_of_eigen = std::conditional_t<
    std::same_as<Scalar, Eigen::half>,
    Half,
    std::conditional_t<std::same_as<Scalar, Eigen::bfloat16>, BFloat16, Scalar>>;

/// Dense, also through a base class, with elements that have a DType.
template <class T>
concept of_eigen =
    requires(T const& t) { requires Element<element_of_eigen<decltype(eigen_scalar_of(t))>>; };

} // namespace detail

template <detail::of_eigen T>
struct tensor_traits<T> {
    static constexpr bool is_expression = true;
};

template <detail::of_eigen T>
    requires((T::Flags & Eigen::DirectAccessBit) != 0)
struct tensor_traits<T> {
    using value_type = detail::element_of_eigen<typename T::Scalar>;
    static constexpr bool is_column_major = T::IsRowMajor == 0;

    static auto* data(auto& t) { return t.data(); }
    static auto extents(T const& t) {
        if constexpr (T::IsVectorAtCompileTime) {
            return std::array{t.size()};
        } else {
            return std::array{t.rows(), t.cols()};
        }
    }
    static auto strides(T const& t) {
        if constexpr (T::IsVectorAtCompileTime) {
            return std::array{t.innerStride()};
        } else {
            return std::array{t.rowStride(), t.colStride()};
        }
    }
};

}} // namespace joinable::v0
