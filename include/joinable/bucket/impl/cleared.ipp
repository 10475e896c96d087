// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/bucket/cleared.hpp>

#include <algorithm>
#include <cstddef>

#include <joinable/device/elements_on_host.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION bool are_cleared(ParameterList const& parameters, Device& device) {
    ElementsOnHost elements{device};
    for (AnyParameter const& parameter : parameters) {
        AnyView const gradient = parameter.requires_grad() ? parameter.grad() : AnyView{};
        if (!gradient) {
            continue;
        }
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
