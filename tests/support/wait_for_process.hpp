// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <sys/types.h>
#include <sys/wait.h>

namespace joinable_tests {

/// Leaves the status to the function that waits for the process.
inline void wait_for_end(pid_t process) {
    siginfo_t info;
    while (::waitid(P_PID, static_cast<id_t>(process), &info, WEXITED | WNOWAIT) != 0) {
    }
}
inline void wait_for_stop(pid_t process) {
    siginfo_t info;
    while (::waitid(P_PID, static_cast<id_t>(process), &info, WSTOPPED | WEXITED | WNOWAIT) != 0) {
    }
}

} // namespace joinable_tests
