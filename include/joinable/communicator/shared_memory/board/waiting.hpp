// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include <joinable/communicator/detail/deadline.hpp>
#include <joinable/communicator/shared_memory/board/system.hpp>
#include <joinable/communicator/shared_memory/board/tuning.hpp>
#include <joinable/config.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// For a thread that others always wake: it sleeps until the deadline.
struct SleepThrough {
    constexpr std::chrono::nanoseconds operator()() const noexcept {
        return (std::chrono::nanoseconds::max)();
    }
};

/// Waits in three stages: spins while an answer usually takes less than a system call, yields so
/// that more ranks than cores make progress, then sleeps. A yield lasts while other programs use
/// the core, so the yielding stage also ends by time: a wait that checks for deaths before it
/// sleeps then does so soon. Signalling a change costs one load unless a rank sleeps. The object
/// may lie in memory that several processes share.
class WaitQueue {
public:
    /// After this time a wait no longer yields.
    static constexpr std::chrono::milliseconds longest_yielding{10};

    /// Spins for some microseconds if every rank has a core. Longer spinning would delay a peer
    /// that shares its core with another program.
    explicit WaitQueue(int ranks)
        : is_crowded_{static_cast<unsigned>(ranks) > std::thread::hardware_concurrency()} {}

    /// Whether there are more ranks than cores.
    [[nodiscard]] bool is_crowded() const noexcept { return is_crowded_; }

    /// Returns true once `ready()`, false at the deadline. The values that `ready` reads must be
    /// changed before wake(), and read here, by sequentially consistent operations. Either the
    /// waker then sees the sleeper, or the sleeper sees the change. `before_sleep()` returns the
    /// longest time to sleep; it may change values that `ready` reads.
    template <class Ready, class BeforeSleep = SleepThrough>
    bool wait(
        Ready const& ready, std::chrono::nanoseconds deadline, BeforeSleep const& before_sleep = {}
    ) {
        int const spins = is_crowded_ ? tuning::crowded_spins : tuning::spins;
        for (int i = 0; i < spins; ++i) {
            if (ready()) {
                return true;
            }
            cpu_relax();
        }
        auto const start = std::chrono::steady_clock::now();
        for (int i = 0; i < tuning::yields; ++i) {
            if (ready()) {
                return true;
            }
            if (std::chrono::steady_clock::now() - start >= longest_yielding) {
                break;
            }
            std::this_thread::yield();
        }
        return sleep(ready, end_of_wait(deadline, start), before_sleep);
    }
    /// The last stage only, for a thread that can do nothing without an answer.
    template <class Ready, class BeforeSleep = SleepThrough>
    bool sleep(
        Ready const& ready,
        std::chrono::steady_clock::time_point end,
        BeforeSleep const& before_sleep = {}
    ) {
        sleepers_.fetch_add(1);
        std::uint32_t seen = wakes_.load(); // before the last check: a later wake ends the sleep
        bool is_ready = ready();
        while (!is_ready && std::chrono::steady_clock::now() < end) {
            futex_wait(wakes_, seen, (std::min)(end, end_of_wait(before_sleep())));
            seen = wakes_.load();
            is_ready = ready();
        }
        sleepers_.fetch_sub(1);
        return is_ready;
    }

    [[nodiscard]] bool has_sleepers() const noexcept { return sleepers_.load() != 0; }
    void wake() noexcept {
        if (has_sleepers()) {
            wakes_.fetch_add(1);
            futex_wake_all(wakes_);
        }
    }

private:
    bool is_crowded_;
    std::atomic<int> sleepers_{0}; ///< including those that were killed while asleep
    FutexWord wakes_{0};
};

}}} // namespace joinable::v0::detail
