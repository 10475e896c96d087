// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

#include <support/strided_param.hpp>

#include <joinable/tensor/parameters.hpp>

namespace joinable_tests {

/// A parameter of an engine that names it, and throws when it is asked to.
struct NamedParam : FixedParam {
    std::string name;
    bool throws = false;
};

} // namespace joinable_tests

template <>
struct joinable::parameter_traits<joinable_tests::NamedParam>
    : joinable::parameter_traits<joinable_tests::FixedParam> {
    static AnyView const* value(joinable_tests::NamedParam& p) {
        if (p.throws) {
            throw std::runtime_error{"the engine failed"};
        }
        return &p.value.view();
    }
    static std::string_view name(joinable_tests::NamedParam const& p) { return p.name; }
};
