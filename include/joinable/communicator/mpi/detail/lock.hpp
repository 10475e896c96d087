// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace joinable { inline namespace v0 { namespace detail {

/// Keeps ProgressThreads apart from the one thread that uses a communicator. A communicator shares
/// it with all groups split from it, because a group receives aborts through its parents.
///
/// The rule: what a rank, its memory, its control messages and those of its parents hold is read
/// and changed under this lock alone. The user's thread takes it in each member of MpiCommunicator
/// and MpiWork and when an arena is freed, and holds it to the end of the call, waits included. A
/// ProgressThread takes it for one pass over the operations. No caller's code runs under it, so
/// nobody takes it twice. Only what never changes is read without it: rank, size, options but the
/// deadline, limits, and the handles of MPI. A result is written to the caller's buffer under it,
/// before the operation becomes complete.
///
/// Without a ProgressThread the user's thread locks nothing.
class MpiLock {
public:
    using Held = std::unique_lock<std::mutex>;

    /// For the user's thread. A ProgressThread makes way for it.
    [[nodiscard]] Held take() {
        if (helpers_ == 0) {
            return {};
        }
        ++wanted_; // a mutex alone would let the ProgressThread win again and again
        Held held{mutex_};
        --wanted_;
        return held;
    }
    /// The user's thread has posted something.
    void notify() noexcept {
        if (helpers_ != 0) {
            posted_.notify_all();
        }
    }
    /// The user's thread starts or ends a ProgressThread. @pre that does not run
    void add_helper(int number) noexcept { helpers_ += number; }

    // -- for a ProgressThread ---------------------------------------------------------------------

    [[nodiscard]] Held take_turn() {
        while (wanted_.load() != 0) {
            std::this_thread::yield();
        }
        return Held{mutex_};
    }
    /// Sleeps until something is posted, stop() was called, or the time is over.
    void sleep(Held& held, std::chrono::nanoseconds time) { posted_.wait_for(held, time); }
    /// For the user's thread: `stops` becomes true.
    void stop(bool& stops) {
        {
            Held const held{mutex_};
            stops = true;
        }
        posted_.notify_all();
    }

private:
    std::mutex mutex_;
    std::condition_variable posted_;
    std::atomic<int> wanted_{0};
    int helpers_ = 0; ///< only the user's thread reads and writes it
};

}}} // namespace joinable::v0::detail
