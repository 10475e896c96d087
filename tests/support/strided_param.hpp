// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <vector>

#include <doctest/doctest.h>
#include <support/numbers.hpp>

#include <joinable/tensor/parameters.hpp>

namespace joinable_tests {

/// A parameter of any dtype and layout whose gradient stays where it is.
struct FixedParam {
    OwnedTensor value;
    OwnedTensor own; ///< what the engine allocated for the gradient
    joinable::AnyView grad;
    bool requires_grad = true;

    /// Makes the engine's own memory the gradient if there is none, zeroed.
    void need_grad() {
        if (!grad) {
            grad = own.view();
            write(grad, Numbers(grad.numel()));
        }
    }
};

/// One that can be told where its gradient is.
struct StridedParam : FixedParam {};

/// Refers to one whose gradient the library may also free.
struct DroppableParam {
    StridedParam* param;
};
inline std::vector<DroppableParam> droppable(std::vector<StridedParam>& params) {
    std::vector<DroppableParam> list;
    for (StridedParam& param : params) {
        list.push_back({&param});
    }
    return list;
}

/// The values, if what lies between their elements was left alone.
inline std::vector<Numbers> values_of(std::vector<StridedParam> const& params) {
    std::vector<Numbers> values;
    for (StridedParam const& param : params) {
        values.push_back(read(param.value.view()));
        CHECK(param.value.has_its_gaps());
    }
    return values;
}

} // namespace joinable_tests

template <>
struct joinable::parameter_traits<joinable_tests::FixedParam> {
    using P = joinable_tests::FixedParam;
    static AnyView const* value(P& p) { return &p.value.view(); }
    static AnyView* grad(P& p) { return p.grad ? &p.grad : nullptr; }
    static bool requires_grad(P const& p) { return p.requires_grad; }
};
template <>
struct joinable::parameter_traits<joinable_tests::StridedParam>
    : joinable::parameter_traits<joinable_tests::FixedParam> {
    static void set_grad(P& p, AnyView const& view) { p.grad = view; }
};
template <>
struct joinable::parameter_traits<joinable_tests::DroppableParam> {
    using P = joinable_tests::DroppableParam;
    using Base = joinable::parameter_traits<joinable_tests::StridedParam>;
    static constexpr bool is_handle = true;
    static AnyView const* value(P& p) { return Base::value(*p.param); }
    static AnyView* grad(P& p) { return Base::grad(*p.param); }
    static bool requires_grad(P const& p) { return p.param->requires_grad; }
    static void set_grad(P& p, AnyView const& view) { p.param->grad = view; }
    static void release_grad(P& p) { p.param->grad = {}; }
};
