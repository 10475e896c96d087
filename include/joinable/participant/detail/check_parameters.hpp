// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/config.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/parameters.hpp>

namespace joinable { inline namespace v0 { namespace detail {

void check_distinct(
    ParameterList const& list, char const* what, AnyView (*view_of)(AnyParameter const&)
);

/// Refuses parameters without a value on `device`, parameters with elements at a null pointer, and
/// parameters whose values or gradients share memory: they would be averaged and stepped more than
/// once. Local.
/// Complexity: sorts the parameters; compares those whose address ranges overlap.
void check_parameters(ParameterList const& list, DeviceId device);

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/participant/detail/check_parameters.ipp>
#endif
