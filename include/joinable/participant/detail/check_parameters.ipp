// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/participant/detail/check_parameters.hpp>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <vector>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/overlap.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void check_distinct(
    ParameterList const& list, char const* what, AnyView (*view_of)(AnyParameter const&)
) {
    std::vector<AnyView> views;
    std::vector<std::size_t> order;
    for (AnyParameter const& parameter : list) {
        views.push_back(view_of(parameter));
        if (views.back().data() != nullptr && views.back().numel() != 0) {
            order.push_back(views.size() - 1);
        }
    }
    auto const begin_of = [&](std::size_t i) {
        return static_cast<std::byte const*>(views[i].data());
    };
    auto const end_of = [&](std::size_t i) {
        std::size_t const size = size_of(views[i].dtype());
        return begin_of(i) + size * checked_reach(views[i].extents(), views[i].strides(), size);
    };
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
        return std::less<>{}(begin_of(a), begin_of(b));
    });
    for (std::size_t a = 0; a < order.size(); ++a) {
        for (std::size_t b = a + 1; b < order.size(); ++b) {
            std::size_t const i = order[a];
            std::size_t const k = order[b];
            if (!std::less<>{}(begin_of(k), end_of(i))) {
                break;
            }
            if (share_memory(views[i], views[k])) {
                throw ContractViolation{
                    to_text(what) + to_text(describe_parameter(list, (std::min)(i, k))) + " and " +
                    to_text(describe_parameter(list, (std::max)(i, k))) +
                    " share memory; list a shared parameter once, and give views of one storage as "
                    "one parameter"
                };
            }
        }
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
