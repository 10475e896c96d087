// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include <joinable/config.hpp>

namespace joinable::inline v0::detail {

/// When a wait that starts now ends. A year stands for any longer time: the sum would overflow.
[[nodiscard]] inline std::chrono::steady_clock::time_point
end_of_wait(std::chrono::nanoseconds deadline) noexcept {
    constexpr std::chrono::nanoseconds year = std::chrono::hours{24 * 365};
    return std::chrono::steady_clock::now() + (std::min)(deadline, year);
}

/// Waiting in three stages: spin while an answer usually takes less than a system call, yield so
/// that more ranks than cores make progress, then sleep. Whoever changes what is waited for pays
/// one load unless somebody sleeps.
class WaitingRoom {
public:
    /// Spins for some microseconds where every rank has a core: longer would keep a peer waiting
    /// that shares its core with another program.
    explicit WaitingRoom(int ranks)
        : spins_{static_cast<unsigned>(ranks) <= std::thread::hardware_concurrency() ? 200 : 20} {}

    /// Returns true once `ready()`, false at the deadline. What `ready` reads is changed before
    /// wake() and read here by sequentially consistent operations: so either the waker sees the
    /// sleeper, or the sleeper sees the change.
    template <class Ready>
    bool wait(Ready const& ready, std::chrono::nanoseconds deadline) {
        for (int i = 0; i < spins_; ++i) {
            if (ready()) {
                return true;
            }
            cpu_relax();
        }
        auto const end = end_of_wait(deadline);
        for (int i = 0; i < yields; ++i) {
            if (ready()) {
                return true;
            }
            std::this_thread::yield();
        }
        std::unique_lock lock{mutex_};
        sleepers_.fetch_add(1);
        bool const is_ready = changed_.wait_until(lock, end, ready);
        sleepers_.fetch_sub(1);
        return is_ready;
    }

    void wake() {
        if (sleepers_.load() != 0) {
            { // a sleeper is either before its last look at ready(), or asleep
                std::lock_guard const lock{mutex_};
            }
            changed_.notify_all();
        }
    }

private:
    static constexpr int yields = 100;

    int spins_;
    std::atomic<int> sleepers_{0};
    std::mutex mutex_;
    std::condition_variable changed_;
};

} // namespace joinable::inline v0::detail
