// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <string>

#include <joinable/config.hpp>
#include <joinable/join/result.hpp>

namespace joinable { inline namespace v0 {

/// The result as one line of JSON: an object with the members of JoinResult under their names. Only
/// `waited` is called `waited_nanoseconds`.
[[nodiscard]] std::string to_json(JoinResult const& result);

}} // namespace joinable::v0

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/trace/impl/join_result.ipp>
#endif
