// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/participant/detail/ready_check.hpp>

#include <string_view>
#include <utility>

#include <joinable/tensor/dtype.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION
ReadyCheck::ReadyCheck(ParameterList parameters, DeviceId device, CheckedMarks marks)
    : parameters_{std::move(parameters)}, is_at_once_{marks == CheckedMarks::at_once} {
    if (device != DeviceId{}) {
        throw ContractViolation{concat(
            "verify_ready reads gradients from the host, but this "
            "communicator's are on ",
            to_text(device),
            "; leave it off"
        )};
    }
}

JOINABLE_DEFINITION std::uint64_t ReadyCheck::hash_of(std::size_t i) const {
    AnyView const gradient = i < parameters_.size() ? parameters_[i].grad() : AnyView{};
    if (!gradient || !has_memory(gradient)) {
        return no_gradient; // the reducer reports it where there has to be one
    }
    Hash hash;
    add(hash, static_cast<char const*>(gradient.data()), gradient, 0);
    return hash.value();
}

JOINABLE_DEFINITION void
ReadyCheck::add(Hash& hash, char const* data, AnyView const& view, std::size_t dimension) {
    std::size_t const element = size_of(view.dtype());
    if (dimension == view.extents().size()) {
        hash.add(std::string_view{data, element});
        return;
    }
    for (std::size_t i = 0; i < view.extents()[dimension]; ++i) {
        add(hash, data + i * view.strides()[dimension] * element, view, dimension + 1);
    }
}

}}} // namespace joinable::v0::detail
