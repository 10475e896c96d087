// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <future>
#include <initializer_list>
#include <mutex>
#include <thread>
#include <vector>

#include <support/function_ref.hpp>
#include <support/hang.hpp>
#include <support/volume.hpp>

#include <joinable/communicator/shared_memory/run_threads.hpp>
#include <joinable/communicator/shared_memory/thread.hpp>
#include <joinable/detail/failure.hpp>

namespace joinable_tests {

/// Ends the program with a message when a test hangs: a test that hangs must fail, not block.
class Watchdog {
public:
    explicit Watchdog(int ranks)
        : thread_{[this, ranks] {
              std::unique_lock lock{mutex_};
              std::chrono::seconds const limit{seconds_to_hang};
              if (!changed_.wait_for(lock, limit, [this] { return is_done_; })) {
                  std::fprintf(stderr, "watchdog: a test over %d ranks hangs\n", ranks);
                  std::abort();
              }
          }} {}
    ~Watchdog() {
        {
            std::lock_guard const lock{mutex_};
            is_done_ = true;
        }
        changed_.notify_all();
    }
    Watchdog(Watchdog const&) = delete;
    Watchdog& operator=(Watchdog const&) = delete;

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool is_done_ = false;
    std::jthread thread_;
};

/// Runs `body(rank)` in a thread for each rank. Throws what the first rank threw that did not throw because of another.
inline void run_in_threads(int size, FunctionRef<void(int)> body) {
    Watchdog const watchdog{size};
    std::vector<std::exception_ptr> errors(static_cast<std::size_t>(size));
    {
        std::vector<std::jthread> threads;
        for (int rank = 0; rank < size; ++rank) {
            threads.emplace_back([&, rank] {
                errors[static_cast<std::size_t>(rank)] =
                    joinable::detail::exception_of([&] { body(rank); });
            });
        }
    }
    if (auto const error = joinable::detail::original(errors, {}, -1)) {
        std::rethrow_exception(error);
    }
}

/// Runs `body(comm)` over groups of these sizes, one after another. What a body throws is rethrown.
inline void
run_ranks(std::initializer_list<int> sizes, FunctionRef<void(joinable::ThreadCommunicator&)> body) {
    for (int const size : sizes) {
        Watchdog const watchdog{size};
        joinable::run_threads(size, [&](joinable::ThreadCommunicator& comm) {
            comm.set_deadline(std::chrono::seconds{60});
            body(comm);
        });
    }
}

/// The same for tests of guards and participants: under a sanitizer over the groups that stand for the others.
inline void run_participants(
    std::initializer_list<int> sizes, FunctionRef<void(joinable::ThreadCommunicator&)> body
) {
    for (int const size : groups_of_participants(sizes)) {
        run_ranks({size}, body);
    }
}

/// Calls `run(one)` for all of these at the same time: for cases that mostly wait.
inline void together(std::initializer_list<int> all, std::function<void(int)> const& run) {
    std::vector<std::future<void>> running;
    for (int const one : all) {
        running.push_back(std::async(std::launch::async, run, one));
    }
    for (auto& one : running) {
        one.get();
    }
}
/// The same for groups of these sizes.
inline void run_ranks_together(
    std::initializer_list<int> sizes, FunctionRef<void(joinable::ThreadCommunicator&)> body
) {
    together(sizes, [&body](int size) { run_ranks({size}, body); });
}

} // namespace joinable_tests
