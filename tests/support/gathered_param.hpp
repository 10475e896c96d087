// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <memory>
#include <new>
#include <utility>
#include <vector>

#include <support/linear_model.hpp>
#include <support/strided_param.hpp>

#include <joinable/tensor/parameters.hpp>

namespace joinable_tests {

/// A parameter whose value is where somebody says.
struct GatheredParam {
    std::shared_ptr<StridedParam>
        own; ///< the engine's: the value that it starts with, and the gradient
    joinable::AnyView value;
    int sets = 0;
    int releases = 0;
    bool set_fails = false;
    bool set_grad_fails = false;
    int reads_to_failure = 0; ///< the read of its value that throws; 0: none

    explicit GatheredParam(std::shared_ptr<StridedParam> engine)
        : own{std::move(engine)}, value{own->value.view()} {}
};

inline std::vector<GatheredParam> gathered(std::vector<StridedParam> params) {
    std::vector<GatheredParam> all;
    for (StridedParam& param : params) {
        all.emplace_back(std::make_shared<StridedParam>(std::move(param)));
    }
    return all;
}

/// A parameter that copies the value it is given.
template <class T>
struct CopyingParamOf : Param<T> {
    using Param<T>::Param;
};
using CopyingParam = CopyingParamOf<float>;

} // namespace joinable_tests

template <>
struct joinable::parameter_traits<joinable_tests::GatheredParam> {
    using P = joinable_tests::GatheredParam;
    static AnyView* value(P& p) {
        if (p.reads_to_failure != 0 && --p.reads_to_failure == 0) {
            throw std::bad_alloc{};
        }
        return p.value ? &p.value : nullptr;
    }
    static AnyView* grad(P& p) { return p.own->grad ? &p.own->grad : nullptr; }
    static bool requires_grad(P const& p) { return p.own->requires_grad; }
    static void set_grad(P& p, AnyView const& view) {
        if (p.set_grad_fails) {
            throw std::bad_alloc{};
        }
        p.own->grad = view;
    }
    static void set_value(P& p, AnyView const& view) {
        if (p.set_fails) {
            throw std::bad_alloc{};
        }
        p.value = view;
        ++p.sets;
    }
    static void release_value(P& p) {
        p.value = {};
        ++p.releases;
    }
};
template <class T>
struct joinable::parameter_traits<joinable_tests::CopyingParamOf<T>> {
    using P = joinable_tests::CopyingParamOf<T>;
    static std::vector<T>* value(P& p) { return &p.value; }
    static AnyView* grad(P& p) { return p.grad ? &p.grad : nullptr; }
    static bool requires_grad(P const& p) { return p.requires_grad; }
    static void set_grad(P& p, AnyView const& view) { p.grad = view; }
    static void set_value(P& p, AnyView const& view) {
        auto const* const data = static_cast<T const*>(view.data());
        p.value.assign(data, data + view.numel());
    }
    static void release_value(P& p) { p.value.clear(); }
};
