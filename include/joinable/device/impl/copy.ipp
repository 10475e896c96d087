// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/device/copy.hpp>

#include <cstddef>
#include <cstring>

#include <joinable/device/detail/loops.hpp>
#include <joinable/reduction/arithmetic.hpp>
#include <joinable/reduction/rows.hpp>
#include <joinable/tensor/overlap.hpp>
#include <joinable/tensor/reduce_op.hpp>

namespace joinable { inline namespace v0 { namespace detail {

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

JOINABLE_DEFINITION bool is_same_view(AnyView const& a, AnyView const& b) {
    return a.data() == b.data() && has_same_steps(a, b);
}

JOINABLE_DEFINITION void check_pair(std::string_view what, AnyView const& from, AnyView const& to) {
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
            ": source and target overlap in memory and are not the same view; go through a copy of the source"
        };
    }
}

/// Applies an operation to each element of `to` and the element of `from` at the same index.
template <class Operation>
void for_each_element(Operation const& operation, AnyView const& from, AnyView const& to) {
    if (to.numel() == 0) {
        return;
    }
    using Element = typename Operation::Element;
    Loops loops{to.extents(), from.strides(), to.strides(), sizeof(Element)};
    for_all_rows(
        loops,
        static_cast<std::byte const*>(from.data()),
        static_cast<std::byte*>(to.data()),
        {ApplyLoops<Operation>::of(),
         &operation,
         sizeof(Element),
         std::same_as<Operation, Assign<bits_of_size<sizeof(Element)>>>}
    );
}

}}} // namespace joinable::v0::detail

namespace joinable { inline namespace v0 {

JOINABLE_DEFINITION void copy(AnyView const& from, AnyView const& to) {
    detail::check_pair("copy", from, to);
    if (detail::is_same_view(from, to)) {
        return;
    }
    if (from.dtype() == DType::c128) {
        return copy(detail::as_reals(from), detail::as_reals(to));
    }
    detail::visit_bits(size_of(from.dtype()), [&]<class Bits>(Bits) {
        detail::for_each_element(detail::Assign<Bits>{}, from, to);
    });
}

JOINABLE_DEFINITION void scale_copy(AnyView const& from, double factor, AnyView const& to) {
    if (factor == 1.0) {
        copy(from, to);
        return;
    }
    detail::check_pair("scale_copy", from, to);
    if (!detail::is_scalable(from.dtype())) {
        throw ContractViolation{
            "scale_copy: a tensor of " + detail::to_text(name_of(from.dtype())) +
            " cannot be scaled by " + detail::to_text(factor) +
            "; only floating-point and complex dtypes can"
        };
    }
    if (detail::is_complex(from.dtype())) {
        return scale_copy(detail::as_reals(from), factor, detail::as_reals(to));
    }
    detail::visit_floating(from.dtype(), [&]<class T>(std::type_identity<T>) {
        detail::for_each_element(detail::Scale<T>{factor}, from, to);
    });
}

JOINABLE_DEFINITION void add(AnyView const& from, AnyView const& to) {
    detail::check_pair("add", from, to);
    if (!detail::is_reducible(from.dtype(), ReduceOp::sum)) {
        throw ContractViolation{
            "add: a tensor of " + detail::to_text(name_of(from.dtype())) +
            " cannot be added; convert it to i32"
        };
    }
    if (detail::is_complex(from.dtype())) {
        return add(detail::as_reals(from), detail::as_reals(to));
    }
    if (is_floating_point(from.dtype())) {
        detail::visit_floating(from.dtype(), [&]<class T>(std::type_identity<T>) {
            detail::for_each_element(detail::Add<T>{}, from, to);
        });
    } else {
        detail::visit_bits(size_of(from.dtype()), [&]<class Bits>(Bits) {
            if constexpr (sizeof(Bits) != 2) {
                detail::for_each_element(detail::Add<Bits>{}, from, to);
            }
        });
    }
}

JOINABLE_DEFINITION void fill_zero(AnyView const& to) {
    detail::check_on_host("fill_zero", "tensor", to);
    if (to.numel() == 0) {
        return;
    }
    if (to.dtype() == DType::c128) {
        return fill_zero(detail::as_reals(to));
    }
    std::size_t const bytes = size_of(to.dtype());
    auto* const start = static_cast<std::byte*>(to.data());
    detail::Loops loops{to.extents(), to.strides(), to.strides(), bytes};
    detail::Loops::Level const row = loops.inner(); // no tiles, as both steps are the same
    loops.for_each(start, start, [&](std::byte const*, std::byte* target) {
        if (row.to == bytes) {
            std::memset(target, 0, row.extent * bytes);
            return;
        }
        detail::visit_bits(bytes, [&]<class Bits>(Bits zero) {
            for (std::size_t i = 0; i < row.extent; ++i) {
                detail::store<Bits>(target + i * row.to, zero);
            }
        });
    });
}

}} // namespace joinable::v0
