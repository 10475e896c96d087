// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <mutex>
#include <vector>

#include <nccl.h>
#include <support/fake_nccl/world.hpp>

/// @file
/// Where ranks meet: what is launched waits on its stream until all ranks have come, and runs then.

namespace joinable_tests::fake_nccl {

/// As one kernel, on the stream of the first; or as a node of the graph that this captures.
/// @pre mutex() is locked
[[nodiscard]] ncclResult_t put_on_stream(std::vector<Op> ops);
/// The same as the operation of a communicator: `function` says by which call.
/// @pre mutex() is locked
[[nodiscard]] ncclResult_t
launch(std::unique_lock<std::mutex>& lock, std::vector<Op> ops, char const* function);

} // namespace joinable_tests::fake_nccl
