// SPDX-License-Identifier: BSL-1.0
#pragma once

#if !__has_include(<mdspan>) || __cplusplus <= 202002L
#error "joinable/interop/mdspan.hpp needs C++23 and a standard library that has <mdspan>"
#endif

#include <array>
#include <concepts>
#include <cstddef>
#include <mdspan>
#include <type_traits>

#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/traits.hpp>

/// @file
/// std::mdspan as a tensor, if strides give the place of its elements: with layout_right,
/// layout_left or layout_stride, and the default accessor. Opt-in: no other header includes this
/// one. Collectives take elements in the order of the layout: with layout_left column by column.

namespace joinable { inline namespace v0 {

template <class E, class Extents, class Layout>
    requires(
        Element<std::remove_const_t<E>> && Layout::template mapping<Extents>::is_always_strided()
    )
struct tensor_traits<std::mdspan<E, Extents, Layout, std::default_accessor<E>>> {
    using T = std::mdspan<E, Extents, Layout, std::default_accessor<E>>;
    using value_type = std::remove_const_t<E>;
    static constexpr bool is_column_major = std::same_as<Layout, std::layout_left>;

    static E* data(T const& t) { return t.data_handle(); }
    static auto extents(T const& t) {
        std::array<typename T::index_type, T::rank()> extents{};
        for (std::size_t d = 0; d < T::rank(); ++d) {
            extents[d] = t.extent(d);
        }
        return extents;
    }
    static auto strides(T const& t) {
        std::array<typename T::index_type, T::rank()> strides{};
        for (std::size_t d = 0; d < T::rank(); ++d) {
            strides[d] = t.stride(d);
        }
        return strides;
    }
};

}} // namespace joinable::v0
