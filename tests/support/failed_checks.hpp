// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>

namespace joinable_tests {

/// How many of doctest's assertions failed in this process: a process rank counts for itself.
inline std::atomic<int> failed_checks{0};

} // namespace joinable_tests
