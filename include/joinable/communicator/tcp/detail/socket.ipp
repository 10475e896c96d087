// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/tcp/detail/socket.hpp>

#include <algorithm>
#include <ctime>
#include <netinet/in.h>
#include <netinet/tcp.h>

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

JOINABLE_DEFINITION void Socket::prepare_connection() const noexcept {
    set(IPPROTO_TCP, TCP_NODELAY, 1);
    set(SOL_SOCKET, SO_KEEPALIVE, 1);
    set(IPPROTO_TCP, TCP_KEEPIDLE, 10);
    set(IPPROTO_TCP, TCP_KEEPINTVL, 5);
    set(IPPROTO_TCP, TCP_KEEPCNT, 4);
    set(IPPROTO_TCP, TCP_USER_TIMEOUT, 30'000);
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
