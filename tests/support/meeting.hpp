// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>

#include <support/wait_until.hpp>

namespace joinable_tests {

/// Where the threads of a test wait for each other outside of any communicator: behind it none of them
/// is still in a call that could hear of what another one does next.
class Meeting {
public:
    explicit Meeting(int threads) noexcept : threads_{threads} {}

    /// Returns when all have come, for as long as that takes.
    void meet() {
        int const round = come_++ / threads_;
        wait_until([&] { return come_ >= (round + 1) * threads_; });
    }

private:
    int threads_;
    std::atomic<int> come_{0};
};

} // namespace joinable_tests
