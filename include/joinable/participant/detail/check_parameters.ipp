// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/participant/detail/check_parameters.hpp>

#include <cstddef>
#include <utility>
#include <vector>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/overlap.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void check_distinct(
    ParameterList const& list, char const* what, AnyView (*view_of)(AnyParameter const&)
) {
    std::vector<AddressRange> ranges;
    for (std::size_t i = 0; i < list.size(); ++i) {
        ranges.push_back(AddressRange::of(view_of(list[i]), i));
    }
    auto const shared = find_shared(
        std::move(ranges),
        [&](std::size_t i) { return view_of(list[i]); },
        [](std::size_t, std::size_t) { return true; }
    );
    if (shared) {
        throw ContractViolation{
            to_text(what) + to_text(describe_parameter(list, shared->first)) + " and " +
            to_text(describe_parameter(list, shared->second)) +
            " share memory; list a shared parameter once, and give views of one storage as "
            "one parameter"
        };
    }
}

JOINABLE_DEFINITION void check_parameters(ParameterList const& list, DeviceId device) {
    for (std::size_t i = 0; i < list.size(); ++i) {
        check_value(list, i, device);
        if (list[i].requires_grad()) {
            check_gradient(list, i, list[i].grad());
        }
    }
    check_distinct(list, "", [](AnyParameter const& parameter) { return parameter.value(); });
    check_distinct(list, "the gradients of ", [](AnyParameter const& parameter) {
        return parameter.grad();
    });
}

}}} // namespace joinable::v0::detail
