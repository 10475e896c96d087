// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/bucket/without_pass.hpp>

#include <algorithm>
#include <cstddef>

#include <joinable/device/elements_on_host.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION bool are_cleared(ParameterList const& parameters, Device& device) {
    ElementsOnHost elements{device};
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        AnyView const gradient =
            parameters[i].requires_grad() ? elements_of_gradient(parameters[i]) : AnyView{};
        if (!gradient) {
            continue;
        }
        check_gradient(parameters, i, gradient);
        auto const bytes = elements.read(gradient);
        if (!std::all_of(bytes.begin(), bytes.end(), [](std::byte byte) {
                return byte == std::byte{};
            })) {
            return false;
        }
    }
    return true;
}

}}} // namespace joinable::v0::detail
