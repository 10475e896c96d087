// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <limits>

#include <joinable/detail/text.hpp>
#include <joinable/join/options.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Lets one call per minute through, from any thread.
class OncePerMinute {
public:
    [[nodiscard]] bool allows(std::chrono::steady_clock::time_point now) noexcept {
        Ticks const ticks = now.time_since_epoch().count();
        Ticks next = next_.load(std::memory_order_relaxed);
        return ticks >= next && next_.compare_exchange_strong(next, ticks + minute);
    }

private:
    using Ticks = std::chrono::steady_clock::rep;
    static constexpr Ticks minute =
        std::chrono::steady_clock::duration{std::chrono::minutes{1}}.count();
    std::atomic<Ticks> next_{(std::numeric_limits<Ticks>::min)()};
};

/// Shared by all guards and ranks of this process.
[[nodiscard]] inline OncePerMinute& skew_warnings() noexcept {
    static OncePerMinute warnings;
    return warnings;
}

/// Warns the user that this rank has been shadowing for many rounds. That costs time, and the data
/// is often dealt badly.
inline void warn_of_skew(JoinOptions const& options, int rank, std::size_t shadow_rounds) {
    if (shadow_rounds <= options.skew_limit || !options.warn ||
        !skew_warnings().allows(std::chrono::steady_clock::now())) {
        return;
    }
    options.warn(
        "rank " + to_text(rank) + " ran out of inputs and has shadowed " + to_text(shadow_rounds) +
        " rounds of the others; deal the data more evenly if that costs too much (JoinOptions::skew_limit is " +
        to_text(options.skew_limit) + ")"
    );
}

}}} // namespace joinable::v0::detail
