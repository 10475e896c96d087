// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <system_error>
#include <thread>
#include <utility>

#include <joinable/communicator/detail/home_process.hpp>
#include <joinable/communicator/tcp/detail/hub.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

#include <csignal>

namespace joinable { inline namespace v0 { namespace detail {

/// The thread that runs the hub, only on rank 0. Failures, deaths and results thus reach all ranks
/// while rank 0 computes. It ends when rank 0 has left, and handles no signals.
class HubThread {
public:
    HubThread() = default;
    /// @throws CommunicationError  the system cannot start another thread.
    explicit HubThread(Hub hub) {
        sigset_t all;
        sigset_t before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before); // the new thread inherits it
        try {
            thread_ = std::jthread{[moved = std::move(hub)]() mutable { moved.run(); }};
        } catch (std::system_error const& error) {
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
            throw CommunicationError{
                concat("the thread where ranks meet could not be started: ", error.what())
            };
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    HubThread(HubThread&&) = default;
    HubThread& operator=(HubThread&&) = delete;
    ~HubThread() {
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
