// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/parameters.hpp>

namespace joinable_tests {

/// A parameter that can be told where its gradient is, as gradients as bucket views need it.
template <class T>
struct Param {
    std::vector<T> value;
    joinable::AnyView grad; ///< empty: none yet
    std::vector<T> storage = {};
    std::string name = {};
    bool requires_grad = true;

    explicit Param(std::size_t n, T start = T{}) : value(n, start), storage(n) {
        grad = joinable::AnyView{storage};
    }
    Param(Param&&) = default;
    Param& operator=(Param&&) = default;
    [[nodiscard]] T& g(std::size_t i) const { return grad.as<T>()(i); }
};

template <class T>
std::vector<Param<T>> make_params(std::vector<std::size_t> const& sizes, T start = T{}) {
    std::vector<Param<T>> params;
    for (std::size_t const size : sizes) {
        params.emplace_back(size, start);
    }
    return params;
}

/// As set_to_none does.
template <class P>
void drop_gradients(std::vector<P>& params) {
    for (P& param : params) {
        param.grad = {};
    }
}

/// Adds to a gradient, which is created where there is none.
template <class T>
void add_gradient(Param<T>& param, double number) {
    if (!param.grad) {
        param.storage.assign(param.value.size(), T{});
        param.grad = joinable::AnyView{param.storage};
    }
    auto const gradient = param.grad.template as<T>();
    for (std::size_t i = 0; i < param.value.size(); ++i) {
        gradient(i) = static_cast<T>(gradient(i) + static_cast<T>(number));
    }
}

} // namespace joinable_tests

template <class T>
struct joinable::parameter_traits<joinable_tests::Param<T>> {
    using P = joinable_tests::Param<T>;
    static auto* value(P& p) { return &p.value; }
    static AnyView* grad(P& p) { return p.grad ? &p.grad : nullptr; }
    static bool requires_grad(P const& p) { return p.requires_grad; }
    static std::string_view name(P const& p) { return p.name; }
    static void set_grad(P& p, AnyView const& view) { p.grad = view; }
};
