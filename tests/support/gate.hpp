// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <span>

#include <sys/mman.h>

namespace joinable_tests {

/// Holds a process at a place of its memory, as if the system had stopped it there. Lies in memory
/// that the process shares with the one that opens it.
struct Gate {
    std::atomic<bool> is_reached{false};
    std::atomic<bool> is_open{false};

    /// This process is held when it touches a page that lies in `memory`. Once in a process.
    void close(std::span<std::byte> memory) {
        auto const at = reinterpret_cast<std::uintptr_t>(memory.data());
        std::size_t const before = (page - at % page) % page;
        begin = memory.data() + before;
        bytes = (memory.size() - before) / page * page;
        closed = this;
        mprotect(begin, bytes, PROT_NONE);
        struct sigaction action{};
        action.sa_handler = [](int) {
            closed->is_reached = true;
            while (!closed->is_open) {
            }
            mprotect(begin, bytes, PROT_READ | PROT_WRITE);
        };
        sigaction(SIGSEGV, &action, nullptr);
    }

private:
    static constexpr std::size_t page = 4096;
    static inline std::byte* begin = nullptr; // for the signal handler
    static inline std::size_t bytes = 0;
    static inline Gate* closed = nullptr;
};

} // namespace joinable_tests
