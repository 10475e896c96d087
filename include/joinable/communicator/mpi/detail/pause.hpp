// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <thread>

namespace joinable { inline namespace v0 { namespace detail {

/// How long a rank waits for answers, for its last words to be taken, and for what others complete for it.
inline constexpr std::chrono::seconds mpi_patience{2};

/// Between two looks of a wait. It looks at once at first, then yields, because other ranks may need this
/// core, and after 10 ms it sleeps.
class MpiPause {
public:
    void operator()() {
        if (turn_ < spins) {
            ++turn_;
            return;
        }
        auto const now = std::chrono::steady_clock::now();
        if (sleeps_at_ == std::chrono::steady_clock::time_point{}) {
            sleeps_at_ = now + std::chrono::milliseconds{10};
        }
        if (now < sleeps_at_) {
            std::this_thread::yield();
        } else {
            std::this_thread::sleep_for(std::chrono::microseconds{50});
        }
    }

private:
    static constexpr int spins = 20;
    int turn_ = 0;
    std::chrono::steady_clock::time_point sleeps_at_{};
};

/// Polls until `is_so()`, for a moment. Whether it came to be.
template <class IsSo>
bool wait_for_a_moment(IsSo const& is_so) {
    auto const end = std::chrono::steady_clock::now() + mpi_patience;
    for (MpiPause pause; !is_so(); pause()) {
        if (std::chrono::steady_clock::now() >= end) {
            return false;
        }
    }
    return true;
}

}}} // namespace joinable::v0::detail
