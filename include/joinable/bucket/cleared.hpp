// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/config.hpp>
#include <joinable/device/device.hpp>
#include <joinable/tensor/parameters.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Whether the engine has cleared all gradients: each is absent, or its bytes are zero. Reads until the first
/// byte that is not; copies gradients of a device to the host. Local.
/// @throws ContractViolation  a gradient has elements, but no memory.
[[nodiscard]] bool are_cleared(ParameterList const& parameters, Device& device);

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/bucket/impl/cleared.ipp>
#endif
