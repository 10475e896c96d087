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
            "verify_ready reads gradients from the host, but this communicator's are on ",
            to_text(device.id()),
            "; leave it off"
        )};
    }
}

JOINABLE_DEFINITION void ReadyCheck::require_unchanged() {
    std::vector<bool> is_checked(parameters_.size());
    for (std::size_t k = marks_.size(); k-- != 0;) {
        Mark const& mark = marks_[k];
        if (mark.i >= parameters_.size() || is_checked[mark.i]) {
            continue;
        }
        is_checked[mark.i] = true;
        std::uint64_t const now = hash_of(mark.i);
        bool const is_gone = is_at_once_ && now == no_gradient;
        if (now != mark.hash && !is_gone) {
            throw ContractViolation{concat(
                "the gradient of ",
                describe_parameter(parameters_, mark.i),
                " changed after ready(",
                mark.i,
                "); call ready when nothing is added to it any more (libtorch: from a hook "
                "after accumulation, not from register_hook)"
            )};
        }
    }
}

JOINABLE_DEFINITION std::uint64_t ReadyCheck::hash_of(std::size_t i) {
    AnyView const gradient =
        i < parameters_.size() ? elements_of_gradient(parameters_[i]) : AnyView{};
    if (!gradient || !has_memory(gradient)) {
        return no_gradient; // the reducer reports it where there has to be one
    }
    std::uint64_t const elements = elements_.hash(gradient);
    AnyView const indices = parameters_[i].sparse_grad().indices;
    return indices ? elements ^ elements_.hash(indices) : elements;
}

}}} // namespace joinable::v0::detail
