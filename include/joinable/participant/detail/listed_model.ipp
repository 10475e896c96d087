// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/participant/detail/listed_model.hpp>

#include <string>
#include <utility>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/any_view.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION ListedModel::ListedModel(ParameterList parameters, bool holds_values)
    : parameters_{std::move(parameters)} {
    listed_.reserve(parameters_.size());
    for (AnyParameter const& parameter : parameters_) {
        AnyView const value = parameter.value();
        listed_.push_back(
            {value.extents(),
             value.device(),
             value.dtype(),
             holds_values && static_cast<bool>(value),
             parameter.requires_grad()}
        );
    }
}

JOINABLE_DEFINITION void
ListedModel::require_same(std::size_t i, std::string_view participant) const {
    ParameterState const& listed = listed_[i];
    std::string const what = describe_parameter(parameters_, i);
    std::string const made{participant};
    if (!listed.requires_grad && parameters_[i].requires_grad()) {
        throw ContractViolation{
            what + " requires a gradient now, but did not when the " + made +
            " was made, so it would not be averaged; make the " + made + " after unfreezing"
        };
    }
    AnyView const value = parameters_[i].value();
    if (!listed.has_value || !value) {
        return; // it may be frozen now: then it has no gradient, which the backward pass notices
    }
    bool const is_moved = value.device() != listed.device;
    if (!is_moved && value.dtype() == listed.dtype && value.extents() == listed.extents) {
        return;
    }
    auto const text = [&](DType dtype, Shape const& extents, DeviceId device) {
        return concat(name_of(dtype), " ", to_text(extents)) +
               (is_moved ? " on " + to_text(device) : std::string{});
    };
    throw ContractViolation{
        what + " is " + text(value.dtype(), value.extents(), value.device()) + " now, but was " +
        text(listed.dtype, listed.extents, listed.device) + " when the " + made +
        " was made; make the " + made +
        (value.extents() == listed.extents ? " after to()" : " after resizing")
    };
}

}}} // namespace joinable::v0::detail
