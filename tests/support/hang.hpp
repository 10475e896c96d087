// SPDX-License-Identifier: BSL-1.0
#pragma once

#if defined(__linux__)
#include <unistd.h>
#else // mingw.sh ends the suites there
inline void alarm(int) {}
#endif

namespace joinable_tests {

/// A group of ranks that has not ended after so many seconds hangs, however busy the machine is. More
/// than any deadline, and less than what ctest gives a test (see cmake/discover_tests.cmake).
inline constexpr int seconds_to_hang = 300;

/// Ends this process, and with it its children, when what it is there for hangs: a thread must not be
/// there at fork.
class Alarm {
public:
    Alarm() { alarm(seconds_to_hang); }
    ~Alarm() { alarm(0); }
    Alarm(Alarm const&) = delete;
    Alarm& operator=(Alarm const&) = delete;
};

} // namespace joinable_tests
