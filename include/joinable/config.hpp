// SPDX-License-Identifier: BSL-1.0
#pragma once

// The only header with conditional compilation: what differs between compilers and systems is
// named here once, everything else is the same text for every flag set.

#include <cstdint>

#define JOINABLE_VERSION_MAJOR 0
#define JOINABLE_VERSION_MINOR 1
#define JOINABLE_VERSION_PATCH 0

namespace joinable::inline v0 {

/// The version of this library; ranks compare it when they enter a guard together.
inline constexpr std::uint32_t library_version =
    JOINABLE_VERSION_MAJOR * 10'000 + JOINABLE_VERSION_MINOR * 100 + JOINABLE_VERSION_PATCH;

} // namespace joinable::inline v0

namespace joinable::inline v0::detail {

/// Tells the core that this is a spinning loop, so that its sibling thread gets the resources.
inline void cpu_relax() noexcept {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

} // namespace joinable::inline v0::detail
