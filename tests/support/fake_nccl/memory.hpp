// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>

/// @file
/// Memory of the fake NCCL and its registration. Beside what fake_nccl.hpp says:
/// - Windows are registered together: a rank waits until all have come, with as many bytes.
/// - In a collective, ranks give the same offset in the same window, or all give none: else the
///   program ends with a message.
/// - So it does when memory is freed that is registered, or was freed; when a handle is destroyed that
///   has windows (an abort ends them), or a window goes while collectives are under way, or a CUDA graph
///   has such that use it.
namespace joinable_tests::fake_nccl {

/// Of ncclMemAlloc, not freed.
[[nodiscard]] std::size_t live_memory();
/// Windows and registrations, of all ranks.
[[nodiscard]] std::size_t live_registrations();
/// What ncclCommWindowRegister makes.
enum class Windows : unsigned char {
    symmetric, ///< once all ranks have come
    local,     ///< without another rank: a system without symmetric memory
    none,      ///< nothing, at once: NCCL_LOCAL_REGISTER=0 on such a system
};
/// For the calling thread, which is a rank. Symmetric ones at start.
void set_windows(Windows made);
/// Collectives of the calling process so far whose buffers were in windows.
[[nodiscard]] std::size_t registered_collectives();

} // namespace joinable_tests::fake_nccl
