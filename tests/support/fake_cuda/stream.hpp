// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include <cuda_runtime_api.h>
#include <support/fake_cuda/capture.hpp>
#include <support/fake_cuda/fake_cuda.hpp>

/// @file
/// What the handles of streams and events point to.

namespace joinable_tests::fake_cuda {

inline std::atomic<std::int64_t> delay_ns{0}; ///< before each operation of a stream

/// Something that a stream gets to, once.
class Milestone {
public:
    void reach() {
        {
            std::lock_guard const lock{mutex_};
            is_reached_ = true;
            at_ = std::chrono::steady_clock::now();
        }
        changed_.notify_all();
    }
    bool is_reached() {
        std::lock_guard const lock{mutex_};
        return is_reached_;
    }
    void wait() {
        std::unique_lock lock{mutex_};
        changed_.wait(lock, [this] { return is_reached_; });
    }
    /// @pre is_reached()
    std::chrono::steady_clock::time_point at() {
        std::lock_guard const lock{mutex_};
        return at_;
    }

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool is_reached_ = false;
    std::chrono::steady_clock::time_point at_;
};

} // namespace joinable_tests::fake_cuda

/// The runtime's header declares these two in the global namespace and leaves them to us.
struct CUstream_st {
    CUstream_st(int on, unsigned int with, bool legacy)
        : device{on}, flags{with}, is_legacy{legacy} {}

    void enqueue(std::function<void()> work) {
        {
            std::lock_guard const lock{mutex};
            queue.push_back(std::move(work));
        }
        changed.notify_all();
    }
    bool is_idle() {
        std::lock_guard const lock{mutex};
        return queue.empty();
    }
    /// What the stream gets to behind everything that is on it; null where that is nothing.
    std::shared_ptr<joinable_tests::fake_cuda::Milestone> mark() {
        std::shared_ptr<joinable_tests::fake_cuda::Milestone> end;
        std::lock_guard const lock{mutex};
        if (!queue.empty()) {
            end = std::make_shared<joinable_tests::fake_cuda::Milestone>();
            queue.push_back([end] { end->reach(); });
        }
        return end;
    }
    void wait_until_idle() {
        std::unique_lock lock{mutex};
        changed.wait(lock, [this] { return queue.empty(); });
    }
    /// What the thread of a stream does until the stream is destroyed and empty.
    void run() {
        std::unique_lock lock{mutex};
        for (;;) {
            changed.wait(lock, [this] { return !queue.empty() || is_closing; });
            if (queue.empty()) {
                return;
            }
            auto work =
                std::move(queue.front()); // its place stays: an empty queue is an idle stream
            lock.unlock();
            if (auto const delay = joinable_tests::fake_cuda::delay_ns.load(); delay > 0) {
                std::this_thread::sleep_for(std::chrono::nanoseconds{delay});
            }
            {
                joinable_tests::fake_cuda::DeviceCode const code;
                work();
            }
            work = nullptr;
            lock.lock();
            queue.pop_front();
            changed.notify_all();
        }
    }

    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> queue; ///< the first one runs
    bool is_closing = false;
    std::atomic<bool> is_capturing{false};
    std::shared_ptr<joinable_tests::fake_cuda::Capture> capture; ///< while it captures
    int device;
    unsigned int flags;
    bool is_legacy; ///< the null stream of its device

    /// Whether it is ordered with the null stream of its device.
    [[nodiscard]] bool is_blocking() const noexcept {
        return !is_legacy && (flags & cudaStreamNonBlocking) == 0;
    }
};

struct CUevent_st {
    std::mutex mutex;
    std::shared_ptr<joinable_tests::fake_cuda::Milestone> last; ///< null: not recorded
    int device;
    std::shared_ptr<joinable_tests::fake_cuda::Capture> capture; ///< where it was recorded last
    joinable_tests::fake_cuda::Clock clock;
};
