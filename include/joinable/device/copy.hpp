// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstring>
#include <string_view>
#include <type_traits>

#include <joinable/device/detail/loops.hpp>
#include <joinable/reduction/arithmetic.hpp>
#include <joinable/reduction/rows.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/overlap.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

inline void check_on_host(std::string_view what, std::string_view role, AnyView const& view) {
    if (view.device().kind != DeviceKind::host) {
        throw ContractViolation{
            to_text(what) + ": the " + to_text(role) + " is on " + to_text(view.device()) +
            ", but this runs on the host; copy it to host memory first, with the engine's own means"
        };
    }
    if (!has_memory(view)) {
        throw ContractViolation{
            to_text(what) + ": the " + to_text(role) + " is a null pointer for " +
            to_text(view.numel()) + " elements; give it memory first"
        };
    }
}

inline bool is_same_view(AnyView const& a, AnyView const& b) {
    if (a.data() != b.data()) {
        return false;
    }
    for (std::size_t d = 0; d < a.extents().size(); ++d) {
        if (a.extents()[d] > 1 && a.strides()[d] != b.strides()[d]) {
            return false;
        }
    }
    return true;
}

/// Throws ContractViolation unless elements of `from` can go where those of `to` are.
inline void check_pair(std::string_view what, AnyView const& from, AnyView const& to) {
    if (!from || !to) {
        throw ContractViolation{concat(
            what,
            " needs two tensors, but the ",
            from ? "target" : "source",
            " is an empty view; give it a tensor"
        )};
    }
    if (from.dtype() != to.dtype() || from.extents() != to.extents()) {
        throw ContractViolation{
            to_text(what) + " needs two tensors of the same dtype and extents, but got " +
            to_text(from) + " and " + to_text(to)
        };
    }
    check_on_host(what, "source", from);
    check_on_host(what, "target", to);
    if (is_overlapping(to.extents(), to.strides())) {
        throw ContractViolation{
            to_text(what) + ": elements of the target share memory (extents " +
            to_text(to.extents()) + ", strides " + to_text(to.strides()) +
            "); write to a view in which each index has its own element"
        };
    }
    if (!is_same_view(from, to) && share_memory(from, to)) {
        throw ContractViolation{
            to_text(what) +
            ": source and target overlap in memory and are not the same view; go through a copy of "
            "the source"
        };
    }
}

/// Applies an operation to each element of `to`, with the element of `from` at the same index.
template <class Operation>
void for_each_element(Operation const& operation, AnyView const& from, AnyView const& to) {
    if (to.numel() == 0) {
        return;
    }
    using Element = typename Operation::Element;
    Loops loops{to.extents(), from.strides(), to.strides(), sizeof(Element)};
    auto* const function = rows_function<Operation>();
    using Bits = bits_of_size<sizeof(Element)>;
    for_all_rows<Bits, std::same_as<Operation, Assign<Bits>>>(
        loops,
        static_cast<std::byte const*>(from.data()),
        static_cast<std::byte*>(to.data()),
        [&](auto const& source, auto const& target, std::size_t count, std::size_t rows) {
            function(operation, source, target, count, rows);
        }
    );
}

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

/// A view that is only read, as the kernels take it.
template <class T>
AnyView source_view(StridedView<T> const& view) {
    using U = std::remove_const_t<T>;
    // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast): the kernels do not write to a source
    return {const_cast<U*>(view.data()), dtype_of<U>, view.extents(), view.strides()};
}

} // namespace detail

/// Copies elements between views that may be strided differently. Local, on the host; no allocation.
/// Source and target are the same view, or share no element; the source alone may name elements
/// twice (a stride of 0 broadcasts).
/// @throws ContractViolation  dtypes, extents or devices do not fit, elements of the target share
///         memory, or the views overlap otherwise; nothing was written.
inline void copy(AnyView const& from, AnyView const& to) {
    detail::check_pair("copy", from, to);
    if (detail::is_same_view(from, to)) {
        return;
    }
    visit_dtype(from.dtype(), [&]<class T>(std::type_identity<T>) {
        detail::for_each_element(detail::Assign<detail::bits_of_size<sizeof(T)>>{}, from, to);
    });
}

/// `to = from * factor`, in one pass: f16 and bf16 compute in float, f32 and f64 in themselves;
/// integers take only the factor 1. Local, on the host; no allocation. Views as for `copy`.
/// @throws ContractViolation  as `copy`, or an integer would be scaled; nothing was written.
inline void scale_copy(AnyView const& from, double factor, AnyView const& to) {
    if (factor == 1.0) {
        copy(from, to);
        return;
    }
    detail::check_pair("scale_copy", from, to);
    visit_dtype(from.dtype(), [&]<class T>(std::type_identity<T>) {
        if constexpr (std::is_integral_v<T>) {
            throw ContractViolation{
                "scale_copy: a tensor of " + detail::to_text(name_of(from.dtype())) +
                " cannot be scaled by " + detail::to_text(factor) +
                "; only floating-point dtypes can"
            };
        } else {
            detail::for_each_element(detail::Scale<T>{factor}, from, to);
        }
    });
}

/// `to += from`, in one pass: f16 and bf16 compute in float and round once, integers wrap. Local, on
/// the host; no allocation. Views as for `copy`; adding a view to itself doubles it.
/// @throws ContractViolation  as `copy`; nothing was written.
inline void add(AnyView const& from, AnyView const& to) {
    detail::check_pair("add", from, to);
    visit_dtype(from.dtype(), [&]<class T>(std::type_identity<T>) {
        if constexpr (std::is_integral_v<T>) {
            detail::for_each_element(detail::Add<detail::bits_of_size<sizeof(T)>>{}, from, to);
        } else {
            detail::for_each_element(detail::Add<T>{}, from, to);
        }
    });
}

/// Sets all elements to zero; an empty view has none. Local, on the host; no allocation. Elements may
/// share memory.
/// @throws ContractViolation  the tensor is not on the host, or is a null pointer.
inline void fill_zero(AnyView const& to) {
    detail::check_on_host("fill_zero", "tensor", to);
    if (to.numel() == 0) {
        return;
    }
    visit_dtype(to.dtype(), [&]<class T>(std::type_identity<T>) {
        using Bits = detail::bits_of_size<sizeof(T)>;
        auto* const target = static_cast<std::byte*>(to.data());
        detail::Loops loops{to.extents(), to.strides(), to.strides(), sizeof(T)};
        detail::for_all_rows<Bits>(
            loops,
            target,
            target,
            [](auto const&, auto const& row, std::size_t count, std::size_t) {
                if (row.step == sizeof(T)) {
                    std::memset(row.data, 0, count * sizeof(T));
                } else {
                    for (std::size_t i = 0; i < count; ++i) {
                        detail::store<Bits>(row.data + i * row.step, Bits{});
                    }
                }
            }
        );
    });
}

/// The same for views whose elements have a type: views of different elements, targets of const
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
        !std::integral<U>, "scale_copy: integers cannot be scaled, only floating-point elements can"
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
