// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

#include <sys/mman.h>
#include <unistd.h>

#include <doctest/doctest.h>

namespace joinable_tests {

/// Calls a function before this thread reads one of two places, if it has read the other one since the last time. What
/// other ranks do there comes between two looks of this rank, however the system schedules threads. One at a time.
class BeforeEachLook {
public:
    /// @pre the places are on two pages; the function and other threads reach these by other addresses only
    BeforeEachLook(void const* one, void const* other, std::function<void()> function)
        : pages_{page_of(one), page_of(other)}, function_{std::move(function)} {
        REQUIRE(pages_[0] != pages_[1]);
        current = this;
        protect(0, PROT_NONE);
        struct sigaction action{};
        action.sa_flags = SA_SIGINFO;
        action.sa_sigaction = [](int, siginfo_t* info, void*) {
            current->take_turn(info->si_addr);
        };
        sigaction(SIGSEGV, &action, &before_);
    }
    ~BeforeEachLook() {
        sigaction(SIGSEGV, &before_, nullptr);
        protect(0, PROT_READ | PROT_WRITE);
        protect(1, PROT_READ | PROT_WRITE);
    }
    BeforeEachLook(BeforeEachLook const&) = delete;
    BeforeEachLook& operator=(BeforeEachLook const&) = delete;

private:
    static std::size_t page_bytes() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }
    static std::byte* page_of(void const* place) {
        auto* const at = static_cast<std::byte*>(const_cast<void*>(place));
        return at - reinterpret_cast<std::uintptr_t>(at) % page_bytes();
    }
    void protect(std::size_t page, int allowed) const {
        mprotect(pages_[page], page_bytes(), allowed);
    }
    /// Opens the page that was touched, and closes the other one. Another place is a crash, which comes again as one.
    void take_turn(void const* touched) {
        if (page_of(touched) != pages_[closed_]) {
            sigaction(SIGSEGV, &before_, nullptr);
            return;
        }
        function_();
        protect(closed_, PROT_READ | PROT_WRITE);
        closed_ = 1 - closed_;
        protect(closed_, PROT_NONE);
    }

    static inline BeforeEachLook* current = nullptr; // for the signal handler
    std::array<std::byte*, 2> pages_;
    std::size_t closed_ = 0;
    std::function<void()> function_;
    struct sigaction before_{};
};

} // namespace joinable_tests
