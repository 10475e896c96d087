// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/detail/group_memory.hpp>
#include <joinable/communicator/detail/group_work.hpp>

namespace joinable::inline v0 {

/// A collective or a message between process ranks. wait() and test() are those of the class behind
/// it, which all ranks of this machine share.
using ProcessWork = detail::GroupWork<detail::Room>;

} // namespace joinable::inline v0
