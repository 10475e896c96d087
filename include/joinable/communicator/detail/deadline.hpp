// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <chrono>
#include <vector>

namespace joinable { inline namespace v0 { namespace detail {

/// When a wait that starts now ends. A year stands for any longer time: the sum would overflow.
[[nodiscard]] inline std::chrono::steady_clock::time_point
end_of_wait(std::chrono::nanoseconds deadline) noexcept {
    constexpr std::chrono::nanoseconds year = std::chrono::hours{24 * 365};
    return std::chrono::steady_clock::now() + (std::min)(deadline, year);
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

}}} // namespace joinable::v0::detail
