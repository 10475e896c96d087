// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include <joinable/config.hpp>

namespace joinable::inline v0::detail {

/// Waiting in three stages: spin while an answer usually takes less than a system call, yield so
/// that more ranks than cores make progress, then sleep. Whoever changes what is waited for pays
/// one load unless somebody sleeps.
class WaitingRoom {
public:
    /// Spins for some microseconds where every rank has a core: longer would keep a peer waiting
    /// that shares its core with another program.
    explicit WaitingRoom(int ranks)
        : spins_{static_cast<unsigned>(ranks) <= std::thread::hardware_concurrency() ? 200 : 20} {}

    /// Returns true once `ready()`, false at the deadline. `ready` reads atomics that are changed
    /// before wake() with sequentially consistent operations.
    template <class Ready>
    bool wait(Ready const& ready, std::chrono::nanoseconds deadline) {
        for (int i = 0; i < spins_; ++i) {
            if (ready()) {
                return true;
            }
            cpu_relax();
        }
        auto const end = std::chrono::steady_clock::now() + deadline;
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
