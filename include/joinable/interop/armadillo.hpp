// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <armadillo>

#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/shape.hpp>
#include <joinable/tensor/traits.hpp>

/// @file
/// Armadillo's dense matrices and cubes as tensors; in CMake, find_package(Armadillo). Opt-in: no
/// other header includes this one. No further code is needed:
/// `struct Layer { arma::fmat value, grad; };` is a Parameter.
///
/// Extents of Mat, Cube and their parts (`m.rows(0, 2)`, `c.slices(0, 1)`) are (rows, columns,
/// slices); extents of Col, Row and their parts are (elements). An expression such as `a + b` is
/// refused with one sentence. Collectives take elements in memory order, which is column by column.

namespace joinable { inline namespace v0 {

namespace detail {

template <class E, class Derived>
E arma_element_of(arma::Base<E, Derived> const&);
template <class E, class Derived>
E arma_element_of(arma::BaseCube<E, Derived> const&);

/// Dense, with elements that have a DType.
template <class T>
concept of_armadillo = requires(T const& t) { requires Element<decltype(arma_element_of(t))>; };

template <class T>
concept armadillo_whole = requires(T const& t) { t.memptr(); };
template <class T>
concept armadillo_cube = requires(T const& t) { t.slice_colptr(0, 0); };
template <class T>
concept armadillo_matrix = requires(T const& t) { t.colptr(0); };

} // namespace detail

template <detail::of_armadillo T>
struct tensor_traits<T> {
    static constexpr bool is_expression = true;
};

template <detail::of_armadillo T>
    requires detail::armadillo_cube<T> || detail::armadillo_matrix<T>
struct tensor_traits<T> {
    using value_type = typename T::elem_type;
    static constexpr bool is_column_major = true;

    static auto* data(auto& t) {
        if constexpr (detail::armadillo_whole<T>) {
            return t.memptr();
        } else if constexpr (detail::armadillo_cube<T>) {
            return t.slice_colptr(0, 0);
        } else {
            return t.colptr(0);
        }
    }
    static Shape extents(T const& t) {
        if constexpr (detail::armadillo_cube<T>) {
            return {t.n_rows, t.n_cols, t.n_slices};
        } else {
            return T::is_row || T::is_col ? Shape{t.n_elem} : Shape{t.n_rows, t.n_cols};
        }
    }
    static Shape strides(T const& t)
        requires(!detail::armadillo_whole<T>) // a part of `m`; the others are dense
    {
        if constexpr (detail::armadillo_cube<T>) {
            return {1, t.m.n_rows, t.m.n_elem_slice};
        } else {
            return T::is_row ? Shape{t.m.n_rows} : T::is_col ? Shape{1} : Shape{1, t.m.n_rows};
        }
    }
};

}} // namespace joinable::v0
