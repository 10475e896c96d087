// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/participant/detail/ready_check.hpp>

#include <utility>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION
ReadyCheck::ReadyCheck(ParameterList parameters, Device& device, CheckedMarks marks)
    : parameters_{std::move(parameters)}, elements_{device},
      is_at_once_{marks == CheckedMarks::at_once} {
    if (!is_on_host(device)) {
        throw ContractViolation{concat(
            "verify_ready reads gradients from the host, but this "
            "communicator's are on ",
            to_text(device.id()),
            "; leave it off"
        )};
    }
}

JOINABLE_DEFINITION std::uint64_t ReadyCheck::hash_of(std::size_t i) {
    AnyView const gradient = i < parameters_.size() ? parameters_[i].grad() : AnyView{};
    if (!gradient || !has_memory(gradient)) {
        return no_gradient; // the reducer reports it where there has to be one
    }
    return elements_.hash(gradient);
}

}}} // namespace joinable::v0::detail
