// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include <joinable/communicator/detail/home_process.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

#include <csignal>

namespace joinable { inline namespace v0 { namespace detail {

/// While it lives, these signals reach neither this thread nor threads that it starts.
class BlockedSignals {
public:
    explicit BlockedSignals(sigset_t const& set) noexcept {
        pthread_sigmask(SIG_BLOCK, &set, &before_);
    }
    BlockedSignals(BlockedSignals const&) = delete;
    BlockedSignals& operator=(BlockedSignals const&) = delete;
    ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

    [[nodiscard]] static sigset_t all() noexcept {
        sigset_t set{};
        sigfillset(&set);
        return set;
    }
    [[nodiscard]] static sigset_t only(int signal) noexcept {
        sigset_t set{};
        sigemptyset(&set);
        sigaddset(&set, signal);
        return set;
    }

private:
    sigset_t before_{};
};

/// A thread of the library. It handles no signals. The destructor waits until it ends; in a process that was
/// forked meanwhile, which does not have the thread, it does nothing.
class BackgroundThread {
public:
    BackgroundThread() = default;
    /// `purpose` is for the error, as "the thread where ranks meet".
    /// @throws CommunicationError  the system cannot start another thread.
    template <class F>
    BackgroundThread(std::string_view purpose, F&& run) {
        BlockedSignals const of_both{BlockedSignals::all()};
        try {
            thread_ = std::jthread{std::forward<F>(run)};
        } catch (std::system_error const& error) {
            throw CommunicationError{concat(purpose, " could not be started: ", error.what())};
        }
    }

    BackgroundThread(BackgroundThread&&) = default;
    BackgroundThread& operator=(BackgroundThread&&) = delete;
    ~BackgroundThread() {
        if (thread_.joinable() && !home_.is_here()) {
            // A forked process does not have the thread, so it can neither join nor detach it.
            static_cast<void>(new std::jthread{std::move(thread_)});
        }
    }

private:
    std::jthread thread_;
    HomeProcess home_;
};

}}} // namespace joinable::v0::detail
