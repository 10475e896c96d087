// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <chrono>
#include <optional>
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

/// Removes from `overdue` the ranks that have reported, within the deadline, that they are working. Returns how
/// long to wait for the first of them, or the deadline if none was removed. `alive_at(rank)` is the time of
/// that rank's last report; the clock's epoch: there was none.
/// @pre this rank has waited for the deadline
template <class AliveAt>
[[nodiscard]] std::chrono::nanoseconds take_ranks_at_work(
    std::vector<int>& overdue, std::chrono::nanoseconds deadline, AliveAt const& alive_at
) {
    auto const now = std::chrono::steady_clock::now();
    std::chrono::nanoseconds left = deadline;
    std::erase_if(overdue, [&](int rank) {
        std::chrono::steady_clock::time_point const reported_at = alive_at(rank);
        std::chrono::nanoseconds const silence = now - reported_at;
        bool const is_at_work =
            reported_at != std::chrono::steady_clock::time_point{} && silence < deadline;
        left = is_at_work ? (std::min)(left, deadline - silence) : left;
        return is_at_work;
    });
    return left;
}

/// How long a wait has lasted: one that blocks, or the sum of the times between tests of a work.
class WaitClock {
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
        if (checked_at_ != std::chrono::steady_clock::time_point{}) {
            longest_gap = (std::min)(longest_gap, longest_nap(deadline));
            waited_ += (std::min)(std::chrono::nanoseconds{now - checked_at_}, longest_gap);
        }
        checked_at_ = now;
        return waited_ >= deadline;
    }
    /// The same. Once the deadline has passed, more() returns how much longer the wait may last, or nothing:
    /// then the next call asks again. Or it throws.
    template <class More>
    void extend_when_reached(
        std::chrono::nanoseconds deadline, std::chrono::nanoseconds longest_gap, More const& more
    ) {
        if (reaches(deadline, longest_gap)) {
            if (std::optional<std::chrono::nanoseconds> const left = more()) {
                extend(deadline, *left);
            }
        }
    }
    /// The deadline will have passed when the wait has lasted for `left` from now on.
    void extend(std::chrono::nanoseconds deadline, std::chrono::nanoseconds left) noexcept {
        constexpr std::chrono::nanoseconds none{0}; // a difference could overflow
        waited_ = (std::max)(deadline, none) - (std::max)(left, none);
    }
    /// For how long a rank that blocks may sleep before its next call.
    [[nodiscard]] std::chrono::nanoseconds nap(std::chrono::nanoseconds deadline) const noexcept {
        constexpr std::chrono::nanoseconds none{0};
        return (std::min)(
            longest_nap(deadline), (std::max)(deadline, waited_) - (std::max)(waited_, none)
        );
    }
    [[nodiscard]] std::chrono::nanoseconds count() const noexcept { return waited_; }

private:
    [[nodiscard]] static std::chrono::nanoseconds longest_nap(std::chrono::nanoseconds deadline
    ) noexcept {
        return (std::max)(deadline / 2, gap_of_tests);
    }

    std::chrono::steady_clock::time_point checked_at_{}; ///< never, at first
    std::chrono::nanoseconds waited_{0};
};

/// Polls until done(), with a pause() between two polls. See WaitClock::extend_when_reached for more().
template <class Done, class Pause, class More>
void wait_until(
    std::chrono::nanoseconds deadline, Done const& done, Pause&& pause, More const& more
) {
    for (WaitClock clock; !done(); pause()) {
        clock.extend_when_reached(deadline, WaitClock::gap_of_waits, more);
    }
}

/// Polls until done(), but no longer than `time`. Returns whether it came true.
template <class Done, class Pause>
bool wait_at_most(std::chrono::nanoseconds time, Done const& done, Pause&& pause) {
    for (auto const end = end_of_wait(time); !done(); pause()) {
        if (std::chrono::steady_clock::now() >= end) {
            return false;
        }
    }
    return true;
}

}}} // namespace joinable::v0::detail
