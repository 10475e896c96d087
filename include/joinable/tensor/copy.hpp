// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string_view>
#include <type_traits>
#include <utility>

#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/overlap.hpp>

namespace joinable::inline v0 {

namespace detail {

/// Two views of the same extents with as few dimensions as possible: extents of 1 dropped, and
/// neighbours merged where both views step through them evenly. The last one varies fastest.
struct MergedLayout {
    Shape extents;
    Shape from;
    Shape to;

    MergedLayout(AnyView const& source, AnyView const& target) {
        for (std::size_t d = 0; d < source.extents().size(); ++d) {
            std::size_t const extent = source.extents()[d];
            if (extent == 1) {
                continue;
            }
            std::size_t const last = extents.size() - 1;
            if (!extents.empty() && from[last] == extent * source.strides()[d] &&
                to[last] == extent * target.strides()[d]) {
                extents[last] *= extent;
                from[last] = source.strides()[d];
                to[last] = target.strides()[d];
            } else {
                extents.push_back(extent);
                from.push_back(source.strides()[d]);
                to.push_back(target.strides()[d]);
            }
        }
    }
};

/// Calls `row(from_offset, to_offset, count, from_stride, to_stride)` for every innermost row.
template <class Row>
void for_each_row(AnyView const& source, AnyView const& target, Row const& row) {
    if (source.numel() == 0) {
        return;
    }
    if (source.strides() == target.strides() &&
        is_non_overlapping_and_dense(source.extents(), source.strides())) {
        row(std::size_t{0}, std::size_t{0}, source.numel(), std::size_t{1}, std::size_t{1});
        return;
    }
    MergedLayout const layout{source, target};
    if (layout.extents.empty()) {
        row(std::size_t{0}, std::size_t{0}, std::size_t{1}, std::size_t{1}, std::size_t{1});
        return;
    }
    std::size_t const inner = layout.extents.size() - 1;
    Shape index = layout.extents;
    for (std::size_t d = 0; d <= inner; ++d) {
        index[d] = 0;
    }
    std::size_t from = 0;
    std::size_t to = 0;
    for (;;) {
        row(from, to, layout.extents[inner], layout.from[inner], layout.to[inner]);
        std::size_t d = inner;
        for (;; --d) { // the next row: an odometer over the outer dimensions
            if (d == 0) {
                return;
            }
            std::size_t const outer = d - 1;
            from += layout.from[outer];
            to += layout.to[outer];
            if (++index[outer] < layout.extents[outer]) {
                break;
            }
            from -= layout.from[outer] * layout.extents[outer];
            to -= layout.to[outer] * layout.extents[outer];
            index[outer] = 0;
        }
    }
}

inline void check_same_kind(std::string_view what, AnyView const& source, AnyView const& target) {
    if (!source || !target || source.dtype() != target.dtype() ||
        source.extents() != target.extents()) {
        throw ContractViolation{concat(
            what,
            " needs two tensors of the same dtype and extents, but got ",
            name_of(source.dtype()),
            " with ",
            source.numel(),
            " elements and ",
            name_of(target.dtype()),
            " with ",
            target.numel()
        )};
    }
}

template <class T>
void copy_row(
    T const* from, T* to, std::size_t count, std::size_t from_stride, std::size_t to_stride
) {
    if (from_stride == 1 && to_stride == 1) {
        std::memmove(to, from, count * sizeof(T));
    } else {
        for (std::size_t i = 0; i < count; ++i) {
            to[i * to_stride] = from[i * from_stride];
        }
    }
}

template <class T>
T scaled(T value, double factor) {
    if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>) {
        return T{static_cast<float>(value) * static_cast<float>(factor)};
    } else {
        return value * static_cast<T>(factor);
    }
}

} // namespace detail

/// Copies elements between views that may be strided differently. Local; no allocation.
/// The views are the same or do not overlap.
/// @throws ContractViolation  dtypes or extents differ; nothing was written.
inline void copy(AnyView const& from, AnyView const& to) {
    detail::check_same_kind("copy", from, to);
    visit_dtype(from.dtype(), [&]<class T>(std::type_identity<T>) {
        auto const* const source = static_cast<T const*>(from.data());
        auto* const target = static_cast<T*>(to.data());
        detail::for_each_row(
            from,
            to,
            [&](auto a, auto b, auto count, auto from_step, auto to_step) {
                detail::copy_row(source + a, target + b, count, from_step, to_step);
            }
        );
    });
}

/// `to = from * factor`, in one pass: f16 and bf16 compute in float, f32 and f64 in themselves;
/// integers take only the factor 1. Local; no allocation. The views are the same or do not overlap.
/// @throws ContractViolation  dtypes or extents differ, or an integer would be scaled.
inline void scale_copy(AnyView const& from, double factor, AnyView const& to) {
    if (factor == 1.0) {
        copy(from, to);
        return;
    }
    detail::check_same_kind("scale_copy", from, to);
    visit_dtype(from.dtype(), [&]<class T>(std::type_identity<T>) {
        if constexpr (std::is_integral_v<T>) {
            throw ContractViolation{detail::concat(
                "scale_copy: a tensor of ",
                name_of(from.dtype()),
                " cannot be scaled by ",
                factor,
                "; only floating-point dtypes can"
            )};
        } else {
            auto const* const source = static_cast<T const*>(from.data());
            auto* const target = static_cast<T*>(to.data());
            detail::for_each_row(
                from,
                to,
                [&](auto a, auto b, auto count, auto from_step, auto to_step) {
                    T const* const in = source + a;
                    T* const out = target + b;
                    if (from_step == 1 && to_step == 1) { // apart, so that it vectorises
                        for (std::size_t i = 0; i < count; ++i) {
                            out[i] = detail::scaled(in[i], factor);
                        }
                    } else {
                        for (std::size_t i = 0; i < count; ++i) {
                            out[i * to_step] = detail::scaled(in[i * from_step], factor);
                        }
                    }
                }
            );
        }
    });
}

/// Sets all elements to zero; an empty view has none. Local; no allocation.
inline void fill_zero(AnyView const& to) {
    visit_dtype(to.dtype(), [&]<class T>(std::type_identity<T>) {
        auto* const target = static_cast<T*>(to.data());
        detail::for_each_row(to, to, [&](auto, auto offset, auto count, auto, auto step) {
            if (step == 1) { // apart, so that it becomes a memset
                std::fill_n(target + offset, count, T{});
            } else {
                for (std::size_t i = 0; i < count; ++i) {
                    target[offset + i * step] = T{};
                }
            }
        });
    });
}

} // namespace joinable::inline v0
