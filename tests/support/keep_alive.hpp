// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <thread>

namespace joinable_tests {

/// Of tests in which a rank must be quicker than a deadline: no machine is so busy that it stalls a
/// thread for as long.
constexpr std::chrono::milliseconds long_deadline{2000};

/// Takes longer than that, and says all the time that this rank is alive.
template <class Comm>
void stay_away_alive(Comm& comm) {
    auto const end = std::chrono::steady_clock::now() + long_deadline * 3 / 2;
    while (std::chrono::steady_clock::now() < end) {
        std::this_thread::sleep_for(std::chrono::milliseconds{10});
        comm.keep_alive();
    }
}

} // namespace joinable_tests
