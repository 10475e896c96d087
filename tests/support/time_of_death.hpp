// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <vector>

namespace joinable_tests {

/// How long it takes until the last of some processes has heard of the death of another one, which all of
/// them share.
class TimeOfDeath {
public:
    using Clock = std::chrono::steady_clock;

    /// The next thing that the caller does is to die, or to stop.
    void happens() { happened_at_ = now(); }
    void is_heard() {
        Clock::rep const heard_at = now();
        Clock::rep latest = heard_at_;
        while (latest < heard_at && !heard_at_.compare_exchange_weak(latest, heard_at)) {
        }
    }
    [[nodiscard]] Clock::duration elapsed() const { return Clock::duration{now() - happened_at_}; }
    /// Until the last one heard of it.
    [[nodiscard]] Clock::duration delay() const {
        return Clock::duration{heard_at_ - happened_at_};
    }

private:
    static Clock::rep now() { return Clock::now().time_since_epoch().count(); }

    std::atomic<Clock::rep> happened_at_{0};
    std::atomic<Clock::rep> heard_at_{0}; ///< by the last one
};

/// What nine of ten delays do not exceed, and never the longest of several: what a test says must not depend
/// on one turn in which other programs had the cores.
inline TimeOfDeath::Clock::duration most_of(std::vector<TimeOfDeath::Clock::duration> delays) {
    std::sort(delays.begin(), delays.end());
    return delays.at((delays.size() - 1) * 9 / 10);
}

} // namespace joinable_tests
