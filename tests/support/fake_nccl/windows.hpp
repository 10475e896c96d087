// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <vector>

#include <support/fake_nccl/world.hpp>

/// @file
/// What collectives and handles ask of memory.cpp.

namespace joinable_tests::fake_nccl {

/// Ends the program unless all of it is a device's.
void check_memory(void const* data, std::size_t bytes, char const* function);
/// Ends the program where `ops`, of all ranks, are not at the same place in their windows.
/// @pre mutex() is locked
void check_places(std::vector<Op> const& ops);
/// The handle is freed, with its windows if it was aborted. @pre mutex() is locked
void end_windows(Member const& member);

} // namespace joinable_tests::fake_nccl
