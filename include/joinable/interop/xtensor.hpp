// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>

#include <xtensor/xexpression.hpp>
#include <xtensor/xlayout.hpp>
#include <xtensor/xtensor_forward.hpp>

#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/traits.hpp>

/// @file
/// xtensor's containers and views as tensors; in CMake, find_package(xtensor). Opt-in: no other
/// header includes this one. No further code is needed:
/// `struct Layer { xt::xtensor<float, 2> value, grad; };` is a Parameter.
///
/// Takes xarray, xtensor, xtensor_fixed, adaptors and their views with strides (`xt::view(a, 0)`,
/// `xt::transpose(a)`). Expressions without strides, such as `a + b` or a view by a list of
/// indices, are refused with one sentence. Collectives take elements in the order of the type, row
/// by row by default.

namespace joinable { inline namespace v0 {

namespace detail {

template <class Derived>
typename Derived::value_type xtensor_element_of(xt::xexpression<Derived> const&);

/// Has elements with a DType.
template <class T>
concept of_xtensor = requires(T const& t) { requires Element<decltype(xtensor_element_of(t))>; };

template <class T>
concept xtensor_memory = of_xtensor<T> && requires(T& t) {
    { t.data() + t.data_offset() } -> std::convertible_to<void const*>;
    t.strides();
};

} // namespace detail

template <detail::of_xtensor T>
struct tensor_traits<T> {
    static constexpr bool is_expression = true;
};

template <detail::xtensor_memory T>
struct tensor_traits<T> {
    using value_type = typename T::value_type;
    static constexpr bool is_column_major = T::static_layout == xt::layout_type::column_major;

    static auto* data(auto& t) { return t.data() + t.data_offset(); }
    static decltype(auto) extents(T const& t) { return t.shape(); }
    static decltype(auto) strides(T const& t) { return t.strides(); }
};

}} // namespace joinable::v0
