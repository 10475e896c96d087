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

/// A thread of the library. It handles no signals. The destructor waits until it ends; in a process that was
/// forked meanwhile, which does not have the thread, it does nothing.
class BackgroundThread {
public:
    BackgroundThread() = default;
    /// `purpose` is for the error, as "the thread where ranks meet".
    /// @throws CommunicationError  the system cannot start another thread.
    template <class F>
    BackgroundThread(std::string_view purpose, F&& run) {
        sigset_t all;
        sigset_t before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before); // the new thread inherits it
        try {
            thread_ = std::jthread{std::forward<F>(run)};
        } catch (std::system_error const& error) {
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
            throw CommunicationError{concat(purpose, " could not be started: ", error.what())};
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
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
