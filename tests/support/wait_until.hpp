// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>
#include <chrono>
#include <thread>

namespace joinable_tests {

/// Waits, for as long as it takes, until another thread or process has done something: what a test
/// says must not depend on how soon that is. Sleeps, as the other one may need this core.
template <class Ready>
void wait_until(Ready const& is_ready) {
    while (!is_ready()) {
        std::this_thread::sleep_for(std::chrono::microseconds{100});
    }
}
template <class Number>
void wait_until(std::atomic<Number> const& number, Number value) {
    wait_until([&] { return number.load() == value; });
}

} // namespace joinable_tests
