// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/detail/socket.hpp>

#include <algorithm>
#include <ctime>
#include <mutex>
#include <pthread.h>
#include <vector>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION std::optional<std::size_t> Socket::receive(std::span<std::byte> into
) const noexcept {
    ssize_t const got = again([&] { return ::recv(handle_, into.data(), into.size(), 0); });
    if (got > 0) {
        return static_cast<std::size_t>(got);
    }
    return got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK) ? std::optional{std::size_t{0}}
                                                                : std::nullopt;
}

JOINABLE_DEFINITION std::optional<std::size_t>
Socket::send(std::span<std::byte const> first, std::span<std::byte const> second) const noexcept {
    iovec parts[] = {part(first), part(second)};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = second.empty() ? 1 : 2;
    ssize_t const taken = again([&] { return ::sendmsg(handle_, &message, MSG_NOSIGNAL); });
    if (taken >= 0) {
        return static_cast<std::size_t>(taken);
    }
    bool const is_full = errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS;
    return is_full ? std::optional{std::size_t{0}} : std::nullopt;
}

/// The open connections of this process. A fork waits until no other thread changes them.
struct OwnConnections {
    std::mutex mutex;
    std::vector<int> handles;
    int forks = 0; ///< a handle of before one may be another file's by now

    /// Exists until the process ends, because threads may run that long.
    static OwnConnections& of_process() {
        static auto* const connections = make();
        return *connections;
    }

private:
    static OwnConnections* make() {
        ::pthread_atfork(
            [] { of_process().mutex.lock(); },
            [] { of_process().mutex.unlock(); },
            [] {
                OwnConnections& own = of_process();
                for (int const handle : own.handles) {
                    ::close(handle);
                }
                own.handles.clear();
                ++own.forks;
                own.mutex.unlock();
            }
        );
        return new OwnConnections;
    }
};

JOINABLE_DEFINITION ForkPause::ForkPause() {
    OwnConnections::of_process().mutex.lock();
}
JOINABLE_DEFINITION ForkPause::~ForkPause() {
    OwnConnections::of_process().mutex.unlock();
}

JOINABLE_DEFINITION void Socket::keep_from_children(ForkPause const& /*pause*/) {
    OwnConnections& own = OwnConnections::of_process();
    own.handles.push_back(handle_);
    forks_ = own.forks;
}

JOINABLE_DEFINITION void Socket::close_handle(int handle, int forks) noexcept {
    if (forks < 0) {
        ::close(handle);
        return;
    }
    OwnConnections& own = OwnConnections::of_process();
    std::lock_guard const lock{own.mutex};
    if (forks == own.forks) { // else it was closed by the fork
        std::erase(own.handles, handle);
        ::close(handle);
    }
}

JOINABLE_DEFINITION int wait_for_any(std::span<pollfd> polled, TimePoint until) noexcept {
    auto const left = std::clamp<std::chrono::nanoseconds>(
        until - std::chrono::steady_clock::now(), std::chrono::nanoseconds{0}, std::chrono::hours{1}
    );
    auto const seconds = std::chrono::duration_cast<std::chrono::seconds>(left);
    timespec const time{
        static_cast<time_t>(seconds.count()), static_cast<long>((left - seconds).count())
    };
    if (::ppoll(polled.data(), polled.size(), &time, nullptr) >= 0) {
        return 0;
    }
    int const error = errno == EINTR ? 0 : errno;
    for (pollfd& one : polled) { // nothing has set these
        one.revents = 0;
    }
    return error;
}

}}} // namespace joinable::v0::detail
