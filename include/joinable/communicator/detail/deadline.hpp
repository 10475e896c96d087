// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <chrono>
#include <vector>

namespace joinable { inline namespace v0 { namespace detail {

/// The time at which a wait that starts now ends. From now to a year from now, because the sum, or
/// the time that is left, could overflow.
[[nodiscard]] inline std::chrono::steady_clock::time_point end_of_wait(
    std::chrono::nanoseconds deadline,
    std::chrono::steady_clock::time_point now = std::chrono::steady_clock::now()
) noexcept {
    constexpr std::chrono::nanoseconds year = std::chrono::hours{24 * 365};
    return now + std::clamp(deadline, std::chrono::nanoseconds{0}, year);
}

/// Removes from `overdue` the ranks that have reported that they are working. Returns how long to
/// wait for the first of them, or the deadline if none was removed. `waited_for(rank)` is how long
/// this rank has waited since that rank's last report.
template <class WaitedFor>
[[nodiscard]] std::chrono::nanoseconds take_ranks_at_work(
    std::vector<int>& overdue, std::chrono::nanoseconds deadline, WaitedFor const& waited_for
) {
    std::chrono::nanoseconds left = deadline;
    std::erase_if(overdue, [&](int rank) {
        std::chrono::nanoseconds const waited = waited_for(rank);
        bool const is_at_work = waited < deadline;
        left = is_at_work ? (std::min)(left, deadline - waited) : left;
        return is_at_work;
    });
    return left;
}

/// How long a work has been polled: the sum of the times between its tests.
class PolledTime {
public:
    /// A gap between two tests counts as at most so much, because a rank may compute there for a
    /// long time.
    static constexpr std::chrono::nanoseconds gap_of_tests = std::chrono::milliseconds{10};
    /// A rank that blocks looks again at once, so a long gap means that its machine is busy, or that
    /// its process was stopped. It counts as at most half the deadline, so the rank looks again.
    static constexpr std::chrono::nanoseconds gap_of_waits = (std::chrono::nanoseconds::max)();

    /// Call this when a test finds nothing. Whether the deadline has passed.
    [[nodiscard]] bool reaches(
        std::chrono::nanoseconds deadline, std::chrono::nanoseconds longest_gap = gap_of_tests
    ) noexcept {
        auto const now = std::chrono::steady_clock::now();
        if (tested_at_ != std::chrono::steady_clock::time_point{}) {
            longest_gap = (std::min)(longest_gap, (std::max)(deadline / 2, gap_of_tests));
            polled_ += (std::min)(std::chrono::nanoseconds{now - tested_at_}, longest_gap);
        }
        tested_at_ = now;
        return polled_ >= deadline;
    }
    [[nodiscard]] std::chrono::nanoseconds count() const noexcept { return polled_; }
    void set(std::chrono::nanoseconds polled) noexcept { polled_ = polled; }

private:
    std::chrono::steady_clock::time_point tested_at_{}; ///< never, at first
    std::chrono::nanoseconds polled_{0};
};

}}} // namespace joinable::v0::detail
