// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>

#include <support/strided_param.hpp>

#include <joinable/tensor/parameters.hpp>

namespace joinable_tests {

/// A value of 16 bits of an engine that says what its gradients are before it has one.
struct WideParam : StridedParam {
    joinable::DType says = joinable::DType::f32;
};

/// `count` elements, and memory for a gradient of `gradient`.
template <class P>
[[nodiscard]] P wide_param(joinable::DType value, joinable::DType gradient, std::size_t count) {
    return P{
        StridedParam{{OwnedTensor{value, {count}, {1}}, OwnedTensor{gradient, {count}, {1}}, {}}}
    };
}

} // namespace joinable_tests

template <>
struct joinable::parameter_traits<joinable_tests::WideParam>
    : joinable::parameter_traits<joinable_tests::StridedParam> {
    static DType grad_dtype(joinable_tests::WideParam const& p) { return p.says; }
};
