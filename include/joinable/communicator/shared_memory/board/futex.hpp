// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#if defined(__linux__)
#include <climits>
#include <ctime>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <thread>
#endif

/// @file
/// Lets a thread sleep until a word changes, even one that other processes write. Besides
/// config.hpp, which must not include system headers, this is the only header that differs between
/// systems.

namespace joinable { inline namespace v0 { namespace detail {

using FutexWord = std::atomic<std::uint32_t>;
static_assert(sizeof(FutexWord) == sizeof(std::uint32_t) && FutexWord::is_always_lock_free);

#if defined(__linux__)

/// Returns soon after `word` has changed from `seen` and a thread has called futex_wake_all, or at
/// `end`. It may also return spuriously, so the caller checks again.
inline void futex_wait(
    FutexWord& word, std::uint32_t seen, std::chrono::steady_clock::time_point end
) noexcept {
    auto const since_boot = end.time_since_epoch(); // the steady clock is CLOCK_MONOTONIC
    auto const seconds = std::chrono::duration_cast<std::chrono::seconds>(since_boot);
    std::timespec until{};
    until.tv_sec = static_cast<decltype(until.tv_sec)>(seconds.count());
    until.tv_nsec =
        static_cast<decltype(until.tv_nsec)>(std::chrono::nanoseconds{since_boot - seconds}.count()
        );
    // FUTEX_WAIT takes a duration; this takes the time at which the wait ends.
    syscall(SYS_futex, &word, FUTEX_WAIT_BITSET, seen, &until, nullptr, FUTEX_BITSET_MATCH_ANY);
}

inline void futex_wake_all(FutexWord& word) noexcept {
    syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

#else

inline void
futex_wait(FutexWord& word, std::uint32_t seen, std::chrono::steady_clock::time_point end) {
    if (word.load() == seen && std::chrono::steady_clock::now() < end) {
        std::this_thread::sleep_for(std::chrono::microseconds{50});
    }
}
inline void futex_wake_all(FutexWord&) noexcept {}

#endif

}}} // namespace joinable::v0::detail
