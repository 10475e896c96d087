// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>

#include <support/linear_model.hpp>

#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/parameters.hpp>

namespace joinable_tests {

/// Counts how often it is read after the test says that it has ended.
struct EndedParam : Param<double> {
    using Param<double>::Param;

    bool has_ended = false;
    int reads_after_end = 0;
};

} // namespace joinable_tests

template <>
struct joinable::parameter_traits<joinable_tests::EndedParam>
    : joinable::parameter_traits<joinable_tests::Param<double>> {
    using P = joinable_tests::EndedParam;
    static AnyView* grad(P& p) {
        p.reads_after_end += p.has_ended ? 1 : 0;
        return p.grad ? &p.grad : nullptr;
    }
    static void set_grad(P& p, AnyView const& view) { p.grad = view; }
    static void release_grad(P& p) { p.grad = {}; }
};
