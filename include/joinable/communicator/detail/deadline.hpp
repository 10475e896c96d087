// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <chrono>
#include <vector>

namespace joinable { inline namespace v0 { namespace detail {

/// When a wait that starts now ends. A year stands for any longer time: the sum would overflow.
[[nodiscard]] inline std::chrono::steady_clock::time_point end_of_wait(
    std::chrono::nanoseconds deadline,
    std::chrono::steady_clock::time_point now = std::chrono::steady_clock::now()
) noexcept {
    constexpr std::chrono::nanoseconds year = std::chrono::hours{24 * 365};
    return now + (std::min)(deadline, year);
}

/// Takes from `overdue` the ranks that say that they are at work, and returns for how much longer the
/// first of them may be waited for: the deadline, where none was taken. `waited_for(rank)` is how long
/// this rank has waited since the rank's last such sign.
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

/// For how long a work was polled: the time between its tests. A long one counts as 10 ms: between two
/// tests a rank may have computed for long.
class PolledTime {
public:
    /// In a test that has found nothing: whether the deadline has passed.
    [[nodiscard]] bool reaches(std::chrono::nanoseconds deadline) noexcept {
        auto const now = std::chrono::steady_clock::now();
        if (tested_at_ != std::chrono::steady_clock::time_point{}) {
            constexpr std::chrono::nanoseconds longest_gap = std::chrono::milliseconds{10};
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
