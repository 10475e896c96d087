// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <span>
#include <utility>

#include <cerrno>
#include <linux/sockios.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <joinable/config.hpp>

namespace joinable { inline namespace v0 { namespace detail {

using TimePoint = std::chrono::steady_clock::time_point;

/// Forks of this process wait while it lives. No Socket that is kept from children may be closed meanwhile.
class ForkPause {
public:
    ForkPause();
    ForkPause(ForkPause const&) = delete;
    ForkPause& operator=(ForkPause const&) = delete;
    ~ForkPause();
};

/// A connection or a listener. Nothing here blocks. If the kernel accepts nothing, or has no data
/// yet, the caller tries again.
class Socket {
public:
    Socket() = default;
    explicit Socket(int handle) noexcept : handle_{handle} {}
    Socket(Socket&& other) noexcept
        : handle_{std::exchange(other.handle_, -1)}, forks_{other.forks_} {}
    Socket& operator=(Socket&& other) noexcept {
        std::swap(handle_, other.handle_);
        std::swap(forks_, other.forks_);
        return *this;
    }
    ~Socket() { close(); }

    [[nodiscard]] bool is_open() const noexcept { return handle_ >= 0; }
    [[nodiscard]] int handle() const noexcept { return handle_; }
    void close() noexcept {
        if (is_open()) {
            close_handle(std::exchange(handle_, -1), forks_);
        }
    }
    /// Processes that are forked from now on close their copy at once. A connection thus ends with
    /// this process, whatever it leaves running. The pause began before the socket was made, or another
    /// thread could have forked in between.
    void keep_from_children(ForkPause const& pause);
    /// The socket whose handle make() returns, kept from children from its first moment on.
    template <class Make>
    [[nodiscard]] static Socket of_this_process(Make const& make) {
        Socket socket; // outlives the pause
        ForkPause const pause;
        socket.handle_ = make();
        if (socket.is_open()) {
            socket.keep_from_children(pause);
        }
        return socket;
    }

    /// The next connection of a listener. Not open if there is none now; then errno tells why.
    [[nodiscard]] Socket accept() const {
        return of_this_process([this] {
            return ::accept4(handle_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
        });
    }

    /// The number of bytes received: at least 1, or 0 if there are none yet. Nothing if no more
    /// will come, because the other side has closed or is lost.
    [[nodiscard]] std::optional<std::size_t> receive(std::span<std::byte> into) const noexcept;
    /// The number of bytes accepted from the parts, in order. Nothing if the other side is lost;
    /// data that it sent earlier can still be received.
    [[nodiscard]] std::optional<std::size_t>
    send(std::span<std::byte const> first, std::span<std::byte const> second = {}) const noexcept;
    /// Ends sending. The other side learns of it after all data.
    void end_sending() const noexcept { ::shutdown(handle_, SHUT_WR); }
    /// Ends listening, also where processes that were forked before have a copy. The port is free then.
    void end_listening() const noexcept { ::shutdown(handle_, SHUT_RDWR); }
    /// How much of what was sent the other machine has not received.
    [[nodiscard]] std::size_t undelivered() const noexcept {
        int left = 0;
        return ioctl(handle_, SIOCOUTQ, &left) != 0 ? 0 : static_cast<std::size_t>(left);
    }

    void set(int level, int option, int value) const noexcept {
        ::setsockopt(handle_, level, option, &value, sizeof value);
    }

private:
    template <class Call>
    static ssize_t again(Call const& call) noexcept {
        ssize_t result = call();
        while (result < 0 && errno == EINTR) {
            result = call();
        }
        return result;
    }
    static iovec part(std::span<std::byte const> bytes) noexcept {
        return {const_cast<std::byte*>(bytes.data()), bytes.size()}; // it only reads
    }

    static void close_handle(int handle, int forks) noexcept;

    int handle_ = -1;
    int forks_ = -1; ///< that had led to this process; -1: it is not kept from children
};

/// Returns after an event, at `until`, or early. Returns 0, or why the system cannot wait.
int wait_for_any(std::span<pollfd> polled, TimePoint until) noexcept;
inline void wait_for(Socket const& socket, short events, TimePoint until) noexcept {
    pollfd polled{socket.handle(), events, 0};
    wait_for_any({&polled, 1}, until);
}

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/detail/impl/socket.ipp>
#endif
