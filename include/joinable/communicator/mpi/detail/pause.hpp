// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <thread>

namespace joinable { inline namespace v0 { namespace detail {

/// How long a rank waits for answers, for its last messages to be sent, and for the others to
/// complete its collectives.
inline constexpr std::chrono::seconds mpi_patience{2};

/// A pause between two polls of a wait. In the first millisecond there is none: each poll moves
/// data, and MPI itself yields if it knows that ranks share cores. Then the wait yields, because
/// others may need this core. After 10 ms it sleeps.
class MpiPause {
public:
    void operator()() {
        auto const now = std::chrono::steady_clock::now();
        if (began_at_ == std::chrono::steady_clock::time_point{}) {
            began_at_ = now;
        }
        if (now - began_at_ >= std::chrono::milliseconds{10}) {
            std::this_thread::sleep_for(std::chrono::microseconds{50});
        } else if (now - began_at_ >= std::chrono::milliseconds{1}) {
            std::this_thread::yield();
        }
    }

private:
    std::chrono::steady_clock::time_point began_at_{};
};

/// Polls until `is_so()`, for the time `moment`. Returns whether it came true.
template <class IsSo>
bool wait_for_a_moment(IsSo const& is_so, std::chrono::nanoseconds moment = mpi_patience) {
    auto const end = std::chrono::steady_clock::now() + moment;
    for (MpiPause pause; !is_so(); pause()) {
        if (std::chrono::steady_clock::now() >= end) {
            return false;
        }
    }
    return true;
}

}}} // namespace joinable::v0::detail
