// SPDX-License-Identifier: BSL-1.0
#pragma once

namespace joinable_tests {

/// A group of ranks that has not ended after so many seconds hangs, however busy the machine is. More
/// than any deadline, and less than what ctest gives a test (see CMakeLists.txt).
inline constexpr int seconds_to_hang = 300;

} // namespace joinable_tests
