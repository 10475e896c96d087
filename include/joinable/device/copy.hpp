// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <string_view>
#include <type_traits>

#include <joinable/config.hpp>
#include <joinable/tensor/any_view.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

bool is_same_view(AnyView const& a, AnyView const& b);

/// Throws ContractViolation unless the elements of `from` can be copied to `to`.
void check_pair(std::string_view what, AnyView const& from, AnyView const& to);

template <class T, class U>
consteval void check_elements() {
    static_assert(
        !std::is_const_v<U>,
        "copy, scale_copy and add: the elements of the target must not be const"
    );
    static_assert(
        std::same_as<std::remove_const_t<T>, std::remove_const_t<U>>,
        "copy, scale_copy and add: source and target must have the same type of elements"
    );
}

} // namespace detail

/// Copies elements between views that may have different strides. Local, on the host; no
/// allocation. Source and target must be the same view or share no element. Only the source may
/// have indices that share elements (a stride of 0 broadcasts).
/// @throws ContractViolation  dtypes, extents or devices do not match, elements of the target share
///                            memory, or the views overlap otherwise; nothing was written.
void copy(AnyView const& from, AnyView const& to);

/// `to = from * factor`, in one pass. f16 and bf16 are computed in float, f32 and f64 in their own
/// type, and complex numbers as pairs. Integers and booleans take only the factor 1. Local, on the host; no allocation. Views as for `copy`.
/// @throws ContractViolation  as `copy`, or an integer or a boolean would be scaled; nothing was written.
void scale_copy(AnyView const& from, double factor, AnyView const& to);

/// `to += from`, in one pass. f16 and bf16 are computed in float and rounded once; integers wrap.
/// Local, on the host; no allocation. Views as for `copy`; adding a view to itself doubles it.
/// @throws ContractViolation  as `copy`, or the elements are boolean, i16 or u16; nothing was written.
void add(AnyView const& from, AnyView const& to);

/// Sets all elements to zero. Does nothing for an empty view. Local, on the host; no allocation.
/// Indices may share elements.
/// @throws ContractViolation  the tensor is not on the host, or is a null pointer.
void fill_zero(AnyView const& to);

/// The same for views with static element types. Views of different elements, targets of const
/// elements and scaled integers do not compile.
template <class T, class U>
void copy(StridedView<T> const& from, StridedView<U> const& to) {
    detail::check_elements<T, U>();
    copy(detail::source_view(from), AnyView{to});
}

template <class T, class U>
void scale_copy(StridedView<T> const& from, double factor, StridedView<U> const& to) {
    detail::check_elements<T, U>();
    static_assert(
        !std::integral<U>,
        "scale_copy: integers cannot be scaled, only floating-point and complex elements can"
    );
    scale_copy(detail::source_view(from), factor, AnyView{to});
}

template <class T, class U>
void add(StridedView<T> const& from, StridedView<U> const& to) {
    detail::check_elements<T, U>();
    add(detail::source_view(from), AnyView{to});
}

template <class T>
void fill_zero(StridedView<T> const& to) {
    detail::check_elements<T, T>();
    fill_zero(AnyView{to});
}

}} // namespace joinable::v0

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/device/impl/copy.ipp>
#endif
