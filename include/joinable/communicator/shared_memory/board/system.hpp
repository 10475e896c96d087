// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
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
/// The services that thread ranks ask of the system: to sleep until a word changes, even one that other
/// processes write, and the size of a page. Besides config.hpp, which must not include system headers, this is the
/// only header of thread ranks that differs between systems.

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

/// The bytes of a page, by which the system takes memory back. Some systems have pages of 64 KiB.
[[nodiscard]] inline std::size_t page_size() noexcept {
    static auto const bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    return bytes;
}

#else // no system calls: a wait looks again and again

inline void
futex_wait(FutexWord& word, std::uint32_t seen, std::chrono::steady_clock::time_point end) {
    if (word.load() == seen && std::chrono::steady_clock::now() < end) {
        std::this_thread::sleep_for(std::chrono::microseconds{50});
    }
}
inline void futex_wake_all(FutexWord&) noexcept {}

[[nodiscard]] inline std::size_t page_size() noexcept {
    return std::size_t{64} << 10U; // as large as any page that is known here
}

#endif

}}} // namespace joinable::v0::detail
