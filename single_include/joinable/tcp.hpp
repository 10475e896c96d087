// SPDX-License-Identifier: BSL-1.0
#pragma once

// joinable in single headers, for projects that copy files. Generated from include/joinable by
// single_include/amalgamate.py: change the headers there, not this file.

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <linux/sockios.h>
#include <memory>
#include <netdb.h>
#include <optional>
#include <poll.h>
#include <span>
#include <string>
#include <string_view>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <system_error>
#include <thread>
#include <type_traits>
#include <unistd.h>
#include <utility>
#include <vector>

#include "join.hpp"

// ---- joinable/communicator/detail/background_thread.hpp

#ifndef JOINABLE_COMMUNICATOR_DETAIL_BACKGROUND_THREAD_HPP_PART_1
#define JOINABLE_COMMUNICATOR_DETAIL_BACKGROUND_THREAD_HPP_PART_1

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

#endif

// ---- joinable/communicator/detail/socket.hpp

#ifndef JOINABLE_COMMUNICATOR_DETAIL_SOCKET_HPP_PART_1
#define JOINABLE_COMMUNICATOR_DETAIL_SOCKET_HPP_PART_1

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

#endif

// ---- joinable/communicator/detail/impl/socket.ipp

#if JOINABLE_HAS_DEFINITIONS
#ifndef JOINABLE_COMMUNICATOR_DETAIL_IMPL_SOCKET_IPP_PART_1
#define JOINABLE_COMMUNICATOR_DETAIL_IMPL_SOCKET_IPP_PART_1

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

#endif
#endif

// ---- joinable/communicator/tcp/detail/socket.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// How long one end of a connection waits for the other.
struct TcpLimits {
    /// For what normally takes no time: an answer of rank 0, a handshake, the last bytes of a rank
    /// that leaves.
    std::chrono::nanoseconds patience = std::chrono::seconds{5};
    /// How long another machine may acknowledge nothing before it counts as lost.
    std::chrono::nanoseconds silence = std::chrono::seconds{30};
};

/// The settings of every connection between ranks. Small messages are sent at once. While nothing is
/// on its way, the kernel notices an unreachable machine after 30 s; SilenceWatch notices it
/// otherwise.
void prepare_connection(Socket const& socket);

/// Whether the other machine has not answered the data or the probe that was sent last, and for how
/// long no acknowledgement has come from it.
struct Acknowledgement {
    bool is_due = false;
    std::chrono::nanoseconds age = {};
};
[[nodiscard]] Acknowledgement acknowledgement_of(Socket const& socket) noexcept;

/// Notices that the other machine of a connection is lost: for `limit` it has acknowledged nothing,
/// although an acknowledgement was due all that time. The kernel of a program that is stopped, or
/// does not read, answers the probes of its shut window; TCP_USER_TIMEOUT would end that connection,
/// too. Such probes come up to 2 min apart, so meanwhile a loss is noticed later.
class SilenceWatch {
public:
    explicit SilenceWatch(std::chrono::nanoseconds limit = TcpLimits{}.silence) noexcept
        : limit_{limit} {}

    [[nodiscard]] TimePoint next_look() const noexcept { return next_; }
    /// Looks when it is time. Bytes acknowledged between two looks count, so nothing is
    /// lost because this process looks late.
    [[nodiscard]] bool is_lost(Socket const& socket, TimePoint now) noexcept;

private:
    std::chrono::nanoseconds limit_;
    TimePoint next_ = {};
    std::optional<TimePoint> silent_since_; ///< the first look that found something due
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/tcp/detail/impl/socket.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <netinet/in.h>
#include <netinet/tcp.h>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void prepare_connection(Socket const& socket) {
    socket.set(IPPROTO_TCP, TCP_NODELAY, 1);
    socket.set(SOL_SOCKET, SO_KEEPALIVE, 1);
    socket.set(IPPROTO_TCP, TCP_KEEPIDLE, 10);
    socket.set(IPPROTO_TCP, TCP_KEEPINTVL, 5);
    socket.set(IPPROTO_TCP, TCP_KEEPCNT, 4);
}

JOINABLE_DEFINITION Acknowledgement acknowledgement_of(Socket const& socket) noexcept {
    tcp_info info{};
    socklen_t size = sizeof info;
    if (::getsockopt(socket.handle(), IPPROTO_TCP, TCP_INFO, &info, &size) != 0) {
        return {}; // no TCP
    }
    // A machine without room drops data that it answers, so such data alone is not due; the kernel
    // sends it again up to 2 min later.
    bool const is_sent_since = info.tcpi_last_data_sent < info.tcpi_last_ack_recv;
    return {
        info.tcpi_probes != 0 || (info.tcpi_unacked != 0 && is_sent_since),
        std::chrono::milliseconds{info.tcpi_last_ack_recv}
    };
}

JOINABLE_DEFINITION bool SilenceWatch::is_lost(Socket const& socket, TimePoint now) noexcept {
    if (now < next_) {
        return false;
    }
    next_ = now + limit_ / 16;
    Acknowledgement const last = acknowledgement_of(socket);
    if (!last.is_due) {
        silent_since_.reset();
    } else if (!silent_since_ || now - last.age > *silent_since_) {
        silent_since_ = now;
    }
    return silent_since_ && now - *silent_since_ >= limit_;
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/tcp/detail/address.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// "example.org:29500", "[::1]:29500"
[[nodiscard]] std::string endpoint_text(std::string const& address, std::uint16_t port);

/// The addresses that a name stands for. There may be several.
class Resolved {
public:
    /// A null `address` means every address of this machine.
    Resolved(char const* address, std::uint16_t port, int flags);
    [[nodiscard]] addrinfo const* first() const noexcept { return list_.get(); }
    /// Why there are no addresses.
    [[nodiscard]] std::string error() const { return ::gai_strerror(error_); }

private:
    struct Free {
        void operator()(addrinfo* list) const noexcept { ::freeaddrinfo(list); }
    };
    std::unique_ptr<addrinfo, Free> list_;
    int error_ = 0;
};

[[nodiscard]] int open_socket(addrinfo const& address) noexcept;

/// Listens on a numeric address of this machine, or on "localhost". Any other name may mean a
/// different address on another machine, so it then listens on every address of this machine.
/// @throws CommunicationError  the port is in use, or the address is not of this machine.
[[nodiscard]] Socket listen_at(std::string const& address, std::uint16_t port);

/// Asked while a rank connects: whether rank 0 is elsewhere. It may throw what ends the attempts.
using IsElsewhere = std::function<bool()>;

/// Tries until `end`. Returns a closed socket if rank 0 is elsewhere.
/// @throws TimedOut            no rank 0 listens there; it is that of a group if `is_renumbered`.
/// @throws CommunicationError  this process may open no more files.
[[nodiscard]] Socket connect_to(
    std::string const& address,
    std::uint16_t port,
    TimePoint end,
    int rank,
    IsElsewhere const& is_elsewhere = {},
    bool is_renumbered = false
);

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/tcp/detail/impl/address.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <sys/socket.h>
#include <thread>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION std::string endpoint_text(std::string const& address, std::uint16_t port) {
    bool const is_ipv6 = address.find(':') != std::string::npos;
    return concat(is_ipv6 ? "[" : "", address, is_ipv6 ? "]:" : ":", port);
}

JOINABLE_DEFINITION Resolved::Resolved(char const* address, std::uint16_t port, int flags) {
    addrinfo hints{};
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = flags | AI_NUMERICSERV;
    addrinfo* found = nullptr;
    error_ = ::getaddrinfo(address, std::to_string(port).c_str(), &hints, &found);
    list_.reset(error_ == 0 ? found : nullptr);
}

JOINABLE_DEFINITION int open_socket(addrinfo const& address) noexcept {
    int const type = SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC;
    return ::socket(address.ai_family, type, address.ai_protocol);
}

JOINABLE_DEFINITION Socket listen_at(std::string const& address, std::uint16_t port) {
    std::string error;
    auto const try_to = [&](Resolved const& found) {
        error = found.first() == nullptr ? found.error() : error;
        for (auto const* at = found.first(); at != nullptr; at = at->ai_next) {
            Socket socket{open_socket(*at)};
            if (socket.is_open()) { // else the error is the one that open_socket() met
                socket.set(SOL_SOCKET, SO_REUSEADDR, 1);
            }
            if (socket.is_open() && at->ai_family == AF_INET6) {
                socket.set(IPPROTO_IPV6, IPV6_V6ONLY, 0);
            }
            if (socket.is_open() && ::bind(socket.handle(), at->ai_addr, at->ai_addrlen) == 0 &&
                ::listen(socket.handle(), SOMAXCONN) == 0) {
                return socket;
            }
            error = std::strerror(errno);
        }
        return Socket{};
    };
    bool const is_local = address == "localhost";
    Resolved const numeric{address.c_str(), port, AI_PASSIVE | (is_local ? 0 : AI_NUMERICHOST)};
    Socket socket;
    if (numeric.first() != nullptr) {
        socket = try_to(numeric);
    } else { // an IPv6 socket that takes IPv4, too, must come first
        for (char const* const any : {"::", "0.0.0.0"}) {
            if (!socket.is_open()) {
                socket = try_to(Resolved{any, port, AI_PASSIVE | AI_NUMERICHOST});
            }
        }
    }
    if (!socket.is_open()) {
        throw CommunicationError{concat(
            "rank 0 cannot listen at ",
            endpoint_text(address, port),
            ": ",
            error,
            "; expected an address of its machine, and a port that nobody else uses: another one "
            "can "
            "be given by JOINABLE_ADDR and JOINABLE_PORT"
        )};
    }
    return socket;
}

JOINABLE_DEFINITION Socket connect_to(
    std::string const& address,
    std::uint16_t port,
    TimePoint end,
    int rank,
    IsElsewhere const& is_elsewhere,
    bool is_renumbered
) {
    constexpr std::chrono::seconds for_one{3
    }; // one address may be unreachable, and the next one not
    constexpr std::chrono::milliseconds longest_pause{100};
    std::chrono::milliseconds pause{1};
    auto const start = std::chrono::steady_clock::now();
    auto const open = [rank](addrinfo const& at) {
        Socket socket = Socket::of_this_process([&] { return open_socket(at); });
        if (!socket.is_open() && errno == EMFILE) { // which waiting does not mend
            throw CommunicationError{concat(
                "rank ",
                rank,
                " cannot connect to rank 0: ",
                std::strerror(EMFILE),
                ": raise its limit of open files (ulimit -n)"
            )};
        }
        return socket;
    };
    for (;;) {
        Resolved const found{address.c_str(), port, 0};
        std::string error = found.first() == nullptr ? found.error() : std::string{};
        if (found.first() == nullptr) { // a name needs files, which may be those that are too many
            addrinfo any{};
            any.ai_family = AF_UNIX;
            static_cast<void>(open(any));
        }
        for (auto const* at = found.first(); at != nullptr; at = at->ai_next) {
            Socket socket = open(*at);
            int failure = 0;
            if (!socket.is_open() || ::connect(socket.handle(), at->ai_addr, at->ai_addrlen) != 0) {
                failure = errno;
            }
            if (failure == EINPROGRESS || failure == EINTR) {
                pollfd polled{socket.handle(), POLLOUT, 0};
                auto const give_up = (std::min)(end, std::chrono::steady_clock::now() + for_one);
                do { // a signal ends a wait early
                    wait_for_any({&polled, 1}, give_up);
                } while (polled.revents == 0 && std::chrono::steady_clock::now() < give_up);
                socklen_t size = sizeof failure;
                ::getsockopt(socket.handle(), SOL_SOCKET, SO_ERROR, &failure, &size);
                failure = failure == 0 && polled.revents == 0 ? ETIMEDOUT : failure;
            }
            if (failure == 0) {
                prepare_connection(socket);
                return socket;
            }
            error = std::strerror(failure);
        }
        if (std::chrono::steady_clock::now() + pause >= end) {
            std::chrono::duration<double> const waited = end - start;
            throw TimedOut{
                {0},
                concat(
                    "rank 0 did not listen at ",
                    endpoint_text(address, port),
                    " within ",
                    waited.count(),
                    " s, while rank ",
                    rank,
                    " tried to connect: ",
                    error,
                    "; start all ranks of a job, with the same address and port"
                ),
                is_renumbered
            };
        }
        if (is_elsewhere && is_elsewhere()) {
            return {};
        }
        std::this_thread::sleep_for(pause);
        pause = (std::min)(2 * pause, longest_pause);
    }
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/tcp/detail/frame.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The messages between ranks and the hub after the handshake.
enum class FrameKind : std::uint8_t {
    // a rank to the hub
    arrival,    ///< in the next collective, with the rank's contribution
    abort,      ///< with an AbortReason
    leave,      ///< the last frame
    keep_alive, ///< extends waits for this rank to one more deadline
    overdue,    ///< waited for a deadline: count, in ns; bytes: what the rank was doing
    question,   ///< which ranks are missing in a collective?
    credit,     ///< only says how much was read, as every frame does
    // the hub to a rank
    start,  ///< all ranks have arrived
    result, ///< of the next collective
    end,    ///< with the AbortReason that all ranks throw
    wait,   ///< answers overdue: `count` ns more, as the missing ranks are working
    answer, ///< to a question: the missing ranks
};

/// Precedes every message. All ranks run on machines with the same byte order.
struct FrameHeader {
    FrameKind kind = FrameKind::credit;
    Collective collective = Collective::barrier;
    DType dtype = DType::u8;
    ReduceOp op = ReduceOp::sum;
    std::int32_t root = 0;
    std::uint64_t sequence = 0; ///< of the collective
    std::uint64_t count = 0;
    std::uint64_t bytes = 0;    ///< of the body
    std::uint64_t consumed = 0; ///< bytes that the sender has read from this connection
};
static_assert(std::is_trivially_copyable_v<FrameHeader> && sizeof(FrameHeader) == 40);

/// The sequence number of the meeting of all ranks, before the first collective.
inline constexpr std::uint64_t meeting = ~std::uint64_t{0};
/// In its place, a wait for one rank beside the collectives.
[[nodiscard]] constexpr std::uint64_t wait_for_rank(int rank) noexcept {
    return meeting - 1 - static_cast<std::uint64_t>(rank);
}
[[nodiscard]] constexpr bool is_wait_for_rank(std::uint64_t sequence, int size) noexcept {
    return sequence < meeting && sequence >= wait_for_rank(size - 1);
}
/// The maximum size of one collective's data, per rank.
inline constexpr std::size_t most_frame_bytes = std::size_t{1} << 30U;
/// A rank has at most so many collectives in flight. The hub refuses a further one.
inline constexpr std::size_t most_in_flight = 64;

template <class T>
[[nodiscard]] std::span<std::byte const> bytes_of(T const& object) noexcept {
    static_assert(std::is_trivially_copyable_v<T>);
    return std::as_bytes(std::span{&object, 1});
}
template <class T>
[[nodiscard]] T object_at(std::span<std::byte const> bytes) noexcept {
    static_assert(std::is_trivially_copyable_v<T>);
    T object;
    std::memcpy(&object, bytes.data(), sizeof object);
    return object;
}

[[nodiscard]] bool are_ranks(std::vector<int> const& numbers, int size) noexcept;
[[nodiscard]] std::vector<int> unpacked_ranks(std::span<std::byte const> bytes);
[[nodiscard]] inline std::string unpacked_text(std::span<std::byte const> bytes) {
    return {reinterpret_cast<char const*>(bytes.data()), bytes.size()};
}

/// Where to put the next bytes of a body of `bytes` bytes, of which `done` have come. The memory
/// grows with `done`, so a header alone costs next to nothing.
[[nodiscard]] std::span<std::byte>
room_in(std::vector<std::byte>& body, std::uint64_t bytes, std::uint64_t done);

/// How the other side broke the protocol.
struct ProtocolError {
    std::string what = {};
};

/// The data waiting to be sent on a connection, in order. If the other side is lost, it accepts and
/// discards everything; the reader of that connection detects the loss.
class Outbox {
public:
    /// Has room for a frame without a body, so a rank can leave without memory.
    Outbox() { waiting_.reserve(sizeof(FrameHeader)); }

    /// Sends at once as much as the kernel accepts and `limit` permits. `limit` counts bytes from
    /// the start of the connection.
    /// @throws std::bad_alloc  nothing of the frame was sent, nor will be.
    void send(
        Socket const& socket,
        std::span<std::byte const> head,
        std::span<std::byte const> body,
        std::uint64_t limit = no_limit
    );
    void flush(Socket const& socket, std::uint64_t limit = no_limit);
    [[nodiscard]] bool is_empty() const noexcept { return begin_ == waiting_.size(); }
    /// Whether more can be sent as soon as the kernel accepts it.
    [[nodiscard]] bool is_blocked(std::uint64_t limit = no_limit) const noexcept {
        return !is_empty() && sent_ < limit;
    }

    /// The number of bytes that the other side may have read.
    [[nodiscard]] std::uint64_t sent() const noexcept { return sent_; }

    static constexpr std::uint64_t no_limit = ~std::uint64_t{0};

private:
    std::size_t count(std::optional<std::size_t> taken, std::size_t given) noexcept {
        sent_ += taken.value_or(given);
        return taken.value_or(given);
    }

    std::vector<std::byte> waiting_;
    std::size_t begin_ = 0; ///< of the waiting data
    std::uint64_t sent_ = 0;
};

/// Assembles frames from a connection. They may come in pieces, or many at once.
class Inbox {
public:
    /// `place(header, done)` returns where the body goes, starting with byte `done`: at least one
    /// byte if any are left, else nothing. It is called with 0 for each header first, and then
    /// whenever that place is full. `take(header)` is called when the frame is complete. Returns
    /// false if nothing more will come. Either may throw; then reading stops, and the next call
    /// begins with the same call.
    template <class Place, class Take>
    [[nodiscard]] bool read(Socket const& socket, Place const& place, Take const& take) {
        parse(place, take); // what could not be taken before, also if nothing more comes
        for (;;) {
            bool const is_direct = begin_ == end_ && place_.size() >= buffer_.size();
            std::span<std::byte> const into = is_direct ? place_ : std::span{buffer_}.subspan(end_);
            std::optional<std::size_t> const got = socket.receive(into);
            if (!got) {
                return false;
            }
            consumed_ += *got;
            if (is_direct) {
                fill(*got);
            } else {
                end_ += *got;
            }
            parse(place, take);
            if (*got < into.size()) { // the kernel has no more
                return true;
            }
        }
    }
    [[nodiscard]] std::uint64_t consumed() const noexcept { return consumed_; }

private:
    template <class Place, class Take>
    void parse(Place const& place, Take const& take) {
        for (;;) {
            if (!has_header_) {
                if (end_ - begin_ < sizeof header_) {
                    break;
                }
                header_ = object_at<FrameHeader>(std::span{buffer_}.subspan(begin_));
                done_ = 0;
                place_ = place(std::as_const(header_), done_);
                begin_ += sizeof header_; // not if that throws
                has_header_ = true;
            }
            std::size_t const piece = (std::min)(place_.size(), end_ - begin_);
            if (piece != 0) {
                std::memcpy(place_.data(), buffer_.data() + begin_, piece);
            }
            begin_ += piece;
            fill(piece);
            if (done_ == header_.bytes) {
                take(std::as_const(header_));
                has_header_ = false; // not if that throws
                continue;
            }
            if (place_.empty()) {
                place_ = place(std::as_const(header_), done_);
            }
            if (begin_ == end_) {
                break;
            }
        }
        std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
        end_ -= begin_;
        begin_ = 0;
    }
    void fill(std::size_t bytes) noexcept {
        place_ = place_.subspan(bytes);
        done_ += bytes;
    }

    std::vector<std::byte> buffer_ = std::vector<std::byte>(16'384);
    std::size_t begin_ = 0;
    std::size_t end_ = 0;
    FrameHeader header_;
    bool has_header_ = false;
    std::uint64_t done_ = 0;     ///< of the body
    std::span<std::byte> place_; ///< for the next bytes of the body
    std::uint64_t consumed_ = 0;
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/tcp/detail/impl/frame.ipp

#if JOINABLE_HAS_DEFINITIONS

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION bool are_ranks(std::vector<int> const& numbers, int size) noexcept {
    return std::all_of(numbers.begin(), numbers.end(), [&](int number) {
        return number >= 0 && number < size;
    });
}

JOINABLE_DEFINITION std::vector<int> unpacked_ranks(std::span<std::byte const> bytes) {
    std::vector<int> ranks;
    for (; bytes.size() >= sizeof(std::int32_t); bytes = bytes.subspan(sizeof(std::int32_t))) {
        ranks.push_back(object_at<std::int32_t>(bytes));
    }
    return ranks;
}

JOINABLE_DEFINITION std::span<std::byte>
room_in(std::vector<std::byte>& body, std::uint64_t bytes, std::uint64_t done) {
    constexpr std::uint64_t least = 65'536;
    body.resize((std::min)(bytes, (std::max)(least, 2 * done)));
    return std::span{body}.subspan(done);
}

JOINABLE_DEFINITION void Outbox::send(
    Socket const& socket,
    std::span<std::byte const> head,
    std::span<std::byte const> body,
    std::uint64_t limit
) {
    // First: nothing may throw once the other side has a part of the frame. The pages of what the kernel takes at once
    // are never touched, and the memory stays, so frames of one size ask for it once.
    std::size_t const most = waiting_.size() + head.size() + body.size();
    if (most > waiting_.capacity()) {
        waiting_.reserve((std::max)(most, 2 * waiting_.capacity()));
    }
    if (is_empty() && sent_ + head.size() + body.size() <= limit) {
        std::size_t const taken = count(socket.send(head, body), head.size() + body.size());
        std::size_t const of_head = (std::min)(taken, head.size());
        head = head.subspan(of_head);
        body = body.subspan(taken - of_head);
    }
    waiting_.insert(waiting_.end(), head.begin(), head.end());
    waiting_.insert(waiting_.end(), body.begin(), body.end());
    flush(socket, limit);
}

JOINABLE_DEFINITION void Outbox::flush(Socket const& socket, std::uint64_t limit) {
    while (!is_empty() && sent_ < limit) {
        std::span const left = std::span{waiting_}.subspan(begin_);
        std::span const now = left.first(
            static_cast<std::size_t>((std::min<std::uint64_t>)(left.size(), limit - sent_))
        );
        std::size_t const taken = count(socket.send(now), now.size());
        if (taken == 0) {
            break;
        }
        begin_ += taken;
    }
    if (is_empty() || begin_ > waiting_.size() / 2) {
        waiting_.erase(waiting_.begin(), waiting_.begin() + static_cast<std::ptrdiff_t>(begin_));
        begin_ = 0;
    }
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/reduction/reduce.hpp

#ifndef JOINABLE_REDUCTION_REDUCE_HPP_PART_1
#define JOINABLE_REDUCTION_REDUCE_HPP_PART_1

namespace joinable { inline namespace v0 { namespace detail {

/// A function from an index to a value, or none. Refers to the given function.
template <class T>
class Numbered {
public:
    Numbered() = default;
    template <class Function>
    Numbered(std::size_t number, Function const& function) noexcept
        : size_{number}, function_{&function}, call_{[](void const* called, std::size_t i) {
              return (*static_cast<Function const*>(called))(i);
          }} {}

    [[nodiscard]] std::size_t size() const noexcept { return size_; }
    [[nodiscard]] T operator[](std::size_t i) const { return call_(function_, i); }

private:
    std::size_t size_ = 0;
    void const* function_ = nullptr;
    T (*call_)(void const*, std::size_t) = nullptr;
};
/// The addresses of all ranks' inputs, or of the outputs.
using Places = Numbered<std::byte*>;
/// The factors by which inputs are multiplied before they are added. May be empty.
using Factors = Numbered<double>;

/// Combines `count` elements of all inputs in rank order and writes them to every output. The bits
/// do not depend on which rank computes them or on how the work was divided. There is at least one
/// input and one output, and is_reducible(dtype, op). An output may be one of the inputs; otherwise they do not overlap. With
/// factors it is a sum of floating-point or complex numbers, each multiplied and rounded first. 16-bit numbers
/// are multiplied as floats.
void reduce_to(
    DType dtype,
    ReduceOp op,
    Places const& inputs,
    Places const& outputs,
    std::size_t count,
    Factors const& factors = {},
    InstructionSet set = instruction_set()
);

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/tcp/detail/collectives.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The collectives in which some but not all ranks have arrived. Ranks arrive in order, so the
/// oldest completes first.
class OpenCollectives {
public:
    explicit OpenCollectives(int size) : size_{static_cast<std::size_t>(size)} {}

    /// Whether a rank may send this header. If so, its size is right.
    [[nodiscard]] bool is_arrival(FrameHeader const& header, int rank) const noexcept;
    /// Whether a rank sends data with its arrival.
    [[nodiscard]] static bool contributes(FrameHeader const& header, int rank) noexcept {
        return header.collective == Collective::all_reduce ||
               (header.collective == Collective::broadcast && header.root == rank);
    }

    /// Whether the rank has arrived in this collective, or in a later one.
    [[nodiscard]] bool has_arrived(std::uint64_t sequence, int rank) const noexcept {
        return sequence < first_ + place_of_next(rank);
    }

    /// Where `rank` puts its contribution, starting with byte `done`.
    /// @pre is_arrival(header, rank), and the rank has no other unfinished arrival
    [[nodiscard]] std::span<std::byte>
    place(FrameHeader const& header, int rank, std::uint64_t done);
    /// Call this when the body is complete.
    void arrive(FrameHeader const& header, int rank);

    [[nodiscard]] bool is_complete() const noexcept {
        return !open_.empty() && open_.front().arrived == size_;
    }
    /// Why the oldest collective cannot run. @pre is_complete()
    [[nodiscard]] std::optional<AbortReason> disagreement() const;
    /// Runs the oldest collective, and calls `give(rank, sequence, body)` for each rank, for rank 0
    /// last.
    /// @pre is_complete()
    template <class Give>
    void finish(Give const& give) {
        Open open = std::move(open_.front());
        open_.pop_front();
        std::uint64_t const sequence = first_++;
        Descriptor const& signature = *open.signatures.front();
        std::size_t const root = as_index(signature.root);
        if (signature.collective == Collective::all_reduce && signature.count != 0) {
            auto const in = [&](std::size_t rank) { return open.bodies[rank].data(); };
            auto const out = [&](std::size_t) { return open.bodies[0].data(); };
            reduce_to(signature.dtype, signature.op, {size_, in}, {1, out}, signature.count);
        }
        for (std::size_t rank = size_; rank-- > 0;) {
            bool const is_given = signature.collective == Collective::all_reduce ||
                                  (signature.collective == Collective::broadcast && rank != root);
            std::span<std::byte const> const body{open.bodies[root]};
            give(static_cast<int>(rank), sequence, is_given ? body : body.first(0));
        }
    }

    [[nodiscard]] bool is_finished(std::uint64_t sequence) const noexcept {
        return sequence < first_;
    }
    /// The ranks that have not arrived. @pre not is_finished(sequence)
    [[nodiscard]] std::vector<int> missing(std::uint64_t sequence) const;

private:
    struct Open {
        explicit Open(std::size_t size) : signatures(size), bodies(size) {}

        std::vector<std::optional<Descriptor>> signatures; ///< from those that have arrived
        std::vector<std::vector<std::byte>> bodies;
        std::size_t arrived = 0;
    };

    [[nodiscard]] std::size_t place_of_next(int rank) const noexcept;

    std::size_t size_;
    std::uint64_t first_ = 0; ///< sequence number of the oldest collective
    std::deque<Open> open_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/tcp/detail/impl/collectives.ipp

#if JOINABLE_HAS_DEFINITIONS

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION bool
OpenCollectives::is_arrival(FrameHeader const& header, int rank) const noexcept {
    bool const is_known = header.collective <= Collective::barrier &&
                          static_cast<std::size_t>(header.dtype) < dtype_count &&
                          static_cast<std::size_t>(header.op) < reduce_op_count &&
                          header.root >= 0 && static_cast<std::size_t>(header.root) < size_;
    std::size_t const element = is_known ? size_of(header.dtype) : 1;
    return is_known && header.count <= most_frame_bytes / element &&
           header.sequence == first_ + place_of_next(rank) &&
           header.sequence < first_ + most_in_flight &&
           header.bytes == (contributes(header, rank) ? header.count * element : 0);
}

JOINABLE_DEFINITION std::span<std::byte>
OpenCollectives::place(FrameHeader const& header, int rank, std::uint64_t done) {
    std::size_t const at = place_of_next(rank);
    if (at == open_.size()) {
        open_.emplace_back(size_);
    }
    return room_in(open_[at].bodies[as_index(rank)], header.bytes, done);
}

JOINABLE_DEFINITION void OpenCollectives::arrive(FrameHeader const& header, int rank) {
    Open& open = open_[place_of_next(rank)];
    open.signatures[as_index(rank)] =
        Descriptor{header.collective, header.dtype, header.op, header.root, header.count};
    ++open.arrived;
}

JOINABLE_DEFINITION std::optional<AbortReason> OpenCollectives::disagreement() const {
    auto const signature_of = [this](int rank) -> Descriptor const& {
        return *open_.front().signatures[as_index(rank)];
    };
    return find_difference(static_cast<int>(size_), signature_of);
}

JOINABLE_DEFINITION std::vector<int> OpenCollectives::missing(std::uint64_t sequence) const {
    std::size_t const at = sequence - first_;
    return ranks_where(static_cast<int>(size_), [&](int rank) {
        return at >= open_.size() || !open_[at].signatures[as_index(rank)];
    });
}

JOINABLE_DEFINITION std::size_t OpenCollectives::place_of_next(int rank) const noexcept {
    std::size_t at = 0;
    while (at < open_.size() && open_[at].signatures[as_index(rank)]) {
        ++at;
    }
    return at;
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/tcp/detail/handshake.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The settings of a job, with the secret that only its ranks know.
struct TcpJob {
    int size = 1;
    std::string job;
    std::string secret;

    static constexpr std::size_t most_text = 1024; ///< bytes in each text
};

/// The first message of a rank on its connection. Job and secret follow. The receiver does not know
/// yet who sent it.
struct Hello {
    std::uint64_t magic = joinable_magic;
    std::uint32_t protocol = own_protocol;
    std::uint32_t library = library_version;
    std::int32_t rank = 0;
    std::int32_t size = 0;
    std::uint32_t job_bytes = 0;
    std::uint32_t secret_bytes = 0;

    /// "joinable", and the byte order.
    static constexpr std::uint64_t joinable_magic = 0x656c'6261'6e69'6f6aU;
    static constexpr std::uint32_t own_protocol = 1;
};
static_assert(sizeof(Hello) == 32);

/// The answer of rank 0. The text follows.
struct Greeting {
    enum class Verdict : std::uint32_t { welcome, other_job, other_program };

    std::uint64_t magic = joinable_magic;
    Verdict verdict = Verdict::welcome;
    std::uint32_t text_bytes = 0;

    static constexpr std::uint64_t joinable_magic = Hello::joinable_magic + 1;
    static constexpr std::uint32_t most_text = 4096;
};
static_assert(sizeof(Greeting) == 16);

[[nodiscard]] std::vector<std::byte> hello_of(int rank, TcpJob const& job);
[[nodiscard]] std::vector<std::byte> greeting_of(Greeting::Verdict verdict, std::string_view text);

/// Takes the same time for all differences between texts of one length.
[[nodiscard]] bool is_same_secret(std::string_view a, std::string_view b) noexcept;

/// Length in bytes of the hello that starts with these bytes, as far as they show it; 0 if they
/// cannot start one.
[[nodiscard]] std::size_t size_of_hello(std::span<std::byte const> begun) noexcept;

/// Why rank 0 rejects a rank.
struct Refusal {
    Greeting::Verdict verdict;
    std::string text;
};
/// Why rank 0 of `job` rejects the sender of this hello, or nothing. @pre the hello is complete.
[[nodiscard]] std::optional<Refusal>
refusal_of(std::span<std::byte const> received, TcpJob const& job);

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/detail/own_rank.hpp

#if JOINABLE_HAS_DEFINITIONS
#ifndef JOINABLE_COMMUNICATOR_DETAIL_OWN_RANK_HPP_PART_1
#define JOINABLE_COMMUNICATOR_DETAIL_OWN_RANK_HPP_PART_1

#include <string>

namespace joinable { inline namespace v0 { namespace detail {

/// Why a process that says so is no rank of any group; empty if it is one.
[[nodiscard]] inline std::string why_no_rank(int rank, int size) {
    bool const is_none = rank < 0 || rank >= size || size > max_ranks;
    std::string const given = concat(", but was given rank ", rank, " of ", size);
    char const* const what = "expected a rank from 0 to below the world size, which is at most ";
    return is_none ? concat(what, max_ranks, given) : std::string{};
}
/// @throws ContractViolation  a process says that it is a rank that no group has.
inline void check_own_rank(int rank, int size) {
    if (std::string const why = why_no_rank(rank, size); !why.empty()) {
        throw ContractViolation{why};
    }
}

}}} // namespace joinable::v0::detail

#endif
#endif

// ---- joinable/communicator/tcp/detail/impl/handshake.ipp

#if JOINABLE_HAS_DEFINITIONS

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION std::vector<std::byte> hello_of(int rank, TcpJob const& job) {
    Hello hello;
    hello.rank = rank;
    hello.size = job.size;
    hello.job_bytes = static_cast<std::uint32_t>(job.job.size());
    hello.secret_bytes = static_cast<std::uint32_t>(job.secret.size());
    std::vector<std::byte> bytes;
    for (auto const part :
         {bytes_of(hello), std::as_bytes(std::span{job.job}), std::as_bytes(std::span{job.secret})
         }) {
        bytes.insert(bytes.end(), part.begin(), part.end());
    }
    return bytes;
}

JOINABLE_DEFINITION std::vector<std::byte>
greeting_of(Greeting::Verdict verdict, std::string_view text) {
    Greeting greeting;
    greeting.verdict = verdict;
    greeting.text_bytes = static_cast<std::uint32_t>(text.size());
    std::vector<std::byte> bytes;
    for (auto const part : {bytes_of(greeting), std::as_bytes(std::span{text})}) {
        bytes.insert(bytes.end(), part.begin(), part.end());
    }
    return bytes;
}

JOINABLE_DEFINITION bool is_same_secret(std::string_view a, std::string_view b) noexcept {
    if (a.size() != b.size()) {
        return false;
    }
    unsigned difference = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        difference |= static_cast<unsigned>(a[i] ^ b[i]);
    }
    return difference == 0;
}

JOINABLE_DEFINITION std::size_t size_of_hello(std::span<std::byte const> begun) noexcept {
    constexpr std::size_t up_to_protocol = sizeof(std::uint64_t) + sizeof(std::uint32_t);
    if (begun.size() < up_to_protocol) {
        return up_to_protocol;
    }
    if (object_at<std::uint64_t>(begun) != Hello::joinable_magic) {
        return 0;
    }
    if (object_at<std::uint32_t>(begun.subspan(sizeof(std::uint64_t))) != Hello::own_protocol) {
        return up_to_protocol; // the rest may be anything
    }
    if (begun.size() < sizeof(Hello)) {
        return sizeof(Hello);
    }
    auto const hello = object_at<Hello>(begun);
    bool const fits =
        hello.job_bytes <= TcpJob::most_text && hello.secret_bytes <= TcpJob::most_text;
    return fits ? sizeof(Hello) + hello.job_bytes + hello.secret_bytes : 0;
}

JOINABLE_DEFINITION std::optional<Refusal>
refusal_of(std::span<std::byte const> received, TcpJob const& job) {
    if (received.size() < sizeof(Hello) || object_at<Hello>(received).library != library_version) {
        return Refusal{
            Greeting::Verdict::other_program,
            concat(
                "expected version ",
                library_version,
                " of joinable, that of rank 0, but this rank has another one: build the programs "
                "of "
                "all ranks with the same version"
            )
        };
    }
    auto const hello = object_at<Hello>(received);
    std::string const their_job = unpacked_text(received.subspan(sizeof hello, hello.job_bytes));
    std::string const secret = unpacked_text(received.subspan(sizeof hello + hello.job_bytes));
    if (!is_same_secret(secret, job.secret)) {
        return Refusal{
            Greeting::Verdict::other_job,
            "expected the secret that rank 0 has, but this rank has another one: give all ranks of "
            "a "
            "job the same JOINABLE_SECRET"
        };
    }
    if (their_job != job.job) {
        return Refusal{
            Greeting::Verdict::other_job,
            concat(
                "expected a rank of job \"",
                job.job,
                "\", for which rank 0 listens here, but this is one of job \"",
                their_job,
                "\": give each job that runs at the same time another port"
            )
        };
    }
    if (hello.size != job.size) {
        return Refusal{
            Greeting::Verdict::other_job,
            concat(
                "expected a group of ",
                job.size,
                " ranks, as rank 0 says, but this rank says ",
                hello.size,
                ": start all ranks of a job with the same world size"
            )
        };
    }
    if (std::string const why = why_no_rank(hello.rank, job.size); !why.empty()) {
        return Refusal{Greeting::Verdict::other_job, why};
    }
    return std::nullopt;
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/tcp/detail/handshake_server.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// Where rank 0 receives connections until all ranks have arrived. Each connection is a stranger at
/// first. It may be slow, silent, send anything, or be another job's rank. No stranger keeps a rank
/// out: all are heard at the same time, each for a limited time, and those that do not belong are
/// rejected.
class HandshakeServer {
public:
    /// A connection has to say who it is within `patience`.
    HandshakeServer(Socket listener, TcpJob job, std::chrono::nanoseconds patience)
        : listener_{std::move(listener)}, job_{std::move(job)}, patience_{patience} {}
    HandshakeServer(HandshakeServer&&) = default;
    HandshakeServer& operator=(HandshakeServer&&) = delete;
    /// Nobody listens at the port after this, not even a process that was forked meanwhile.
    ~HandshakeServer() { listener_.end_listening(); }

    [[nodiscard]] TcpJob const& job() const noexcept { return job_; }

    /// Why this process cannot accept connections; empty if it can.
    [[nodiscard]] std::string obstacle() const {
        return refused_for_ == 0        ? std::string{}
               : refused_for_ == EMFILE ? "too many open files: raise its limit of them (ulimit -n)"
                                        : std::string{std::strerror(refused_for_)};
    }

    /// The events to wait for before the next call of poll().
    void poll(std::vector<pollfd>& polled) const {
        if (std::chrono::steady_clock::now() >= accept_again_) {
            polled.push_back({listener_.handle(), POLLIN, 0});
        }
        for (Stranger const& stranger : strangers_) {
            polled.push_back({stranger.socket.handle(), POLLIN, 0});
        }
    }
    /// When to call poll() at the latest.
    [[nodiscard]] TimePoint next_look() const noexcept {
        TimePoint next = std::chrono::steady_clock::now() + std::chrono::hours{1};
        if (!strangers_.empty()) {
            next = (std::min)(next, strangers_.front().end); // they are in order of arrival
        }
        return accept_again_ > std::chrono::steady_clock::now() ? (std::min)(next, accept_again_)
                                                                : next;
    }

    /// `is_here(rank)` tells whether a rank has already arrived. `admit(rank, socket)` admits one.
    template <class IsHere, class Admit>
    void poll(IsHere const& is_here, Admit const& admit) {
        accept_all(is_here, admit);
        auto const now = std::chrono::steady_clock::now();
        std::erase_if(strangers_, [&](Stranger& stranger) {
            return !listen_to(stranger, is_here, admit) || now >= stranger.end;
        });
    }

private:
    struct Stranger {
        Socket socket;
        TimePoint end;
        std::vector<std::byte> received = {};
        bool is_refused = false; ///< keeps reading: closing could destroy its answer
    };
    static constexpr std::size_t most_strangers = 256;

    /// Reads from each connection as soon as it is accepted. If the process has hardly any file
    /// descriptors left, strangers must pass quickly; the first bytes already identify a rank.
    template <class IsHere, class Admit>
    void accept_all(IsHere const& is_here, Admit const& admit) {
        auto const now = std::chrono::steady_clock::now();
        for (int i = 0; i < 64 && now >= accept_again_; ++i) {
            Socket socket = listener_.accept();
            if (!socket.is_open()) {
                bool const is_full =
                    errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS;
                if (is_full && !strangers_.empty()) { // drop the oldest stranger
                    strangers_.pop_front();
                    continue;
                }
                refused_for_ = is_full ? errno : 0;
                if (is_full) {
                    accept_again_ = now + std::chrono::milliseconds{50};
                }
                return;
            }
            refused_for_ = 0;
            Stranger stranger{std::move(socket), end_of_wait(patience_, now)};
            prepare_connection(stranger.socket);
            if (!listen_to(stranger, is_here, admit)) {
                continue;
            }
            if (strangers_.size() == most_strangers) {
                strangers_.pop_front();
            }
            strangers_.push_back(std::move(stranger));
        }
    }

    /// Whether the connection stays open.
    template <class IsHere, class Admit>
    bool listen_to(Stranger& stranger, IsHere const& is_here, Admit const& admit) {
        if (stranger.is_refused) { // one piece at a time, or one that never pauses is heard alone
            std::array<std::byte, 512> ignored{};
            return stranger.socket.receive(ignored).has_value();
        }
        for (;;) {
            std::size_t const whole = size_of_hello(stranger.received);
            if (whole == 0) {
                return false;
            }
            if (whole == stranger.received.size()) {
                return decide(stranger, is_here, admit);
            }
            std::size_t const begun = stranger.received.size();
            stranger.received.resize(whole);
            auto const got = stranger.socket.receive(std::span{stranger.received}.subspan(begun));
            stranger.received.resize(begun + got.value_or(0));
            if (!got || *got == 0) {
                return got.has_value();
            }
        }
    }
    template <class IsHere, class Admit>
    bool decide(Stranger& stranger, IsHere const& is_here, Admit const& admit) {
        std::optional<Refusal> refusal = refusal_of(stranger.received, job_);
        int const rank = refusal ? 0 : object_at<Hello>(stranger.received).rank;
        if (!refusal && is_here(rank)) {
            refusal = Refusal{
                Greeting::Verdict::other_job,
                concat(
                    "expected no other rank ",
                    rank,
                    " of this job, but there is one: give each rank its number"
                )
            };
        }
        std::string const text = refusal ? refusal->text : "";
        auto const verdict = refusal ? refusal->verdict : Greeting::Verdict::welcome;
        std::vector<std::byte> const greeting = greeting_of(verdict, text);
        auto const sent = stranger.socket.send(greeting); // it fits: nothing was sent before
        if (refusal) {
            stranger.socket.end_sending();
            stranger.is_refused = true;
            return true;
        }
        if (sent == greeting.size()) {
            admit(rank, std::move(stranger.socket));
        }
        return false;
    }

    Socket listener_;
    TcpJob job_;
    std::chrono::nanoseconds patience_;
    std::deque<Stranger> strangers_;
    TimePoint accept_again_{};
    int refused_for_ = 0; ///< why the system gave no connection when it was last asked for one
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/tcp/detail/hub.hpp

namespace joinable { inline namespace v0 { namespace detail {

void check_open_files(std::size_t needed);

/// The meeting place of all ranks of a group. It has a connection to each rank, including rank 0.
/// It alone decides whether a collective completes or ends. Every rank receives its frames in the
/// same order. It shares nothing with rank 0 but that connection.
class Hub {
public:
    /// Ranks connect to `listener`. `rank_0` is the other end of rank 0's connection. A rank whose
    /// machine acknowledges nothing for `limits.silence` is lost.
    /// @throws CommunicationError  this process may not open a file for each other rank.
    Hub(Socket listener, Socket rank_0, TcpJob job, TcpLimits const& limits = {});

    /// Returns when rank 0 has left, and the others have left or have received the frames sent to
    /// them, or have received nothing for the patience.
    void run() noexcept {
        try {
            try {
                start_if_all_are_here();
                while (serve()) {
                }
            } catch (...) { // no memory for one rank's data may be enough for a few words
                end(
                    {FailureKind::communication,
                     {0},
                     "rank 0, where the ranks meet, ran out of memory"}
                );
                begin_to_leave();
                while (serve()) {
                }
            }
        } catch (...) { // all connections close, which all ranks notice
            members_.clear();
        }
    }

private:
    using Clock = std::chrono::steady_clock;

    struct Member {
        Socket socket = {};
        Inbox inbox = {};
        Outbox outbox = {};
        std::vector<std::byte> body = {}; ///< of an incoming frame that is no arrival
        SilenceWatch watch{};
        std::uint64_t consumed = 0; ///< of the bytes sent to it
        Clock::time_point alive_at = {};
        bool has_come = false;
        bool has_ended = false; ///< sends nothing any more

        /// A busy rank reads nothing, so it gets no more than this before it reads again. Its
        /// kernel then has room for the data in flight, unless its buffers are set to be small. So
        /// the window stays open, and the loss of its machine is noticed soon.
        [[nodiscard]] std::uint64_t limit() const noexcept { return consumed + 49'152; }
    };
    /// A report from a rank that has waited for its deadline.
    struct Overdue {
        int rank;
        FrameHeader header;
        std::string meanwhile;
    };

    [[nodiscard]] int size() const noexcept { return static_cast<int>(members_.size()); }
    [[nodiscard]] Member& member(int rank) noexcept { return members_[as_index(rank)]; }
    [[nodiscard]] bool is_linked(int rank) noexcept { return member(rank).socket.is_open(); }

    // -- one turn ---------------------------------------------------------------------------------

    /// Waits for an event and handles it. Returns false after the last one.
    bool serve();

    void attend_to(int rank);
    /// Nothing more comes from a rank that has not left.
    void lose_connection(int rank);

    // -- what ranks say ---------------------------------------------------------------------------

    std::span<std::byte> place_for(int rank, FrameHeader const& header, std::uint64_t done);

    /// Whether a rank that follows the protocol may send this now. After the end, a rank may not
    /// know of the end yet, and its requests are ignored.
    [[nodiscard]] bool can_say(int rank, FrameHeader const& header);

    /// @pre can_say(rank, header)
    void take(int rank, FrameHeader const& header);

    /// A rank has waited for its deadline. That ends all ranks, unless the ranks that it waits for
    /// have called keep_alive() meanwhile. @pre all incoming data was read first, because this
    /// process may have been stopped
    void judge(int rank, FrameHeader const& header, std::string const& meanwhile);

    void answer(int rank, std::uint64_t sequence);

    [[nodiscard]] bool is_finished(std::uint64_t sequence) const noexcept {
        return sequence == meeting
                   ? !handshakes_.has_value()
                   : !is_wait_for_rank(sequence, size()) && collectives_.is_finished(sequence);
    }
    [[nodiscard]] std::vector<int> missing(std::uint64_t sequence) const;

    // -- frames to ranks --------------------------------------------------------------------------
    // Rank 0 comes last: its kernel delivers the others' frames even if rank 0 then dies.

    void send(int rank, FrameHeader header, std::span<std::byte const> body = {});
    void flush(Member& one);

    void finish_collective();

    /// The first reason is the one of all ranks. Nothing completes after it. If the memory runs
    /// out meanwhile, the next call goes on.
    void end(AbortReason reason);
    void send_end(int rank) { send(rank, {.kind = FrameKind::end}, packed(*end_)); }

    // -- coming and going -------------------------------------------------------------------------

    void look_into_lobby();
    void admit(int rank, Socket socket);
    void start_if_all_are_here();
    void lose(int rank, AbortReason const& reason);
    /// From now on nothing is waited for but the delivery of what was sent.
    void begin_to_leave();
    /// Rank 0 has left. Whether the others need nothing more from this machine.
    bool is_over();

    OpenCollectives collectives_;
    std::vector<Member> members_;
    TcpLimits limits_;
    std::optional<HandshakeServer> handshakes_; ///< until all ranks have arrived
    std::optional<AbortReason> end_;
    int untold_ = 0;                   ///< ranks below this one have not been told of it
    std::optional<TimePoint> leaving_; ///< when to stop, after rank 0 has left
    std::uint64_t delivered_ = 0;      ///< of the bytes of all ranks, since then
    std::vector<pollfd> polled_;
    std::vector<int> polled_ranks_; ///< whose connections come first in polled_
    std::vector<Overdue> overdue_;  ///< for the next turn to judge
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/tcp/detail/impl/hub.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fcntl.h>
#include <limits>
#include <string>
#include <sys/resource.h>
#include <utility>

namespace joinable { inline namespace v0 { namespace detail {

/// @throws CommunicationError  this process may not open `needed` more files.
/// Complexity: a system call for each file that is open or needed.
JOINABLE_DEFINITION void check_open_files(std::size_t needed) {
    rlimit limit{};
    getrlimit(RLIMIT_NOFILE, &limit);
    std::size_t left = 0;
    for (int file = 0; left < needed && static_cast<rlim_t>(file) < limit.rlim_cur; ++file) {
        left += ::fcntl(file, F_GETFD) == -1 ? 1U : 0U;
    }
    if (left < needed) {
        throw CommunicationError{concat(
            "rank 0 needs an open file for each of ",
            needed,
            " other ranks, but its process may open only ",
            left,
            " more (",
            limit.rlim_cur,
            " in all): raise that limit (ulimit -n)"
        )};
    }
}

JOINABLE_DEFINITION
Hub::Hub(Socket listener, Socket rank_0, TcpJob job, TcpLimits const& limits)
    : collectives_{job.size}, members_(static_cast<std::size_t>(job.size)), limits_{limits} {
    check_open_files(static_cast<std::size_t>(job.size) - 1); // rank 0's own are open
    handshakes_.emplace(std::move(listener), std::move(job), limits_.patience);
    admit(0, std::move(rank_0));
}

JOINABLE_DEFINITION bool Hub::serve() {
    TimePoint next = Clock::now() + std::chrono::hours{1};
    polled_.clear();
    polled_ranks_.clear();
    for (int rank = 0; rank < size(); ++rank) {
        if (!is_linked(rank)) {
            continue; // the system may refuse more entries than a process may have files
        }
        Member const& one = member(rank);
        next = (std::min)(next, one.watch.next_look());
        bool const is_blocked = one.outbox.is_blocked(leaving_ ? Outbox::no_limit : one.limit());
        auto const events = static_cast<short>(POLLIN | (is_blocked ? POLLOUT : 0));
        polled_.push_back({one.socket.handle(), events, 0});
        polled_ranks_.push_back(rank);
    }
    if (handshakes_) {
        handshakes_->poll(polled_);
        next = (std::min)(next, handshakes_->next_look());
    }
    if (leaving_) { // the kernel does not report delivery
        next = (std::min)(*leaving_, Clock::now() + std::chrono::milliseconds{1});
    }
    // Judge overdue ranks one turn later: a rank that seems silent may have sent a sign before the
    // last turn read the report.
    auto const overdue = std::exchange(overdue_, {});
    int const error = wait_for_any(polled_, overdue.empty() ? next : Clock::now());
    if (error != 0 && !leaving_) {
        end(
            {FailureKind::communication,
             {0},
             concat("rank 0 cannot wait for the other ranks: ", std::strerror(error))}
        );
        begin_to_leave();
    }
    for (std::size_t i = 0; i < polled_ranks_.size(); ++i) {
        if (polled_[i].revents != 0) {
            attend_to(polled_ranks_[i]);
        }
    }
    for (int rank = 0; rank < size(); ++rank) {
        Member& one = member(rank);
        if (is_linked(rank) && one.watch.is_lost(one.socket, Clock::now())) {
            lose_connection(rank);
        }
    }
    for (Overdue const& one : overdue) {
        judge(one.rank, one.header, one.meanwhile);
    }
    look_into_lobby();
    start_if_all_are_here();
    return !leaving_ || !is_over();
}

JOINABLE_DEFINITION void Hub::attend_to(int rank) {
    Member& one = member(rank);
    bool goes_on = true;
    bool makes_sense = true;
    try {
        goes_on = one.inbox.read(
            one.socket,
            [&](FrameHeader const& header, std::uint64_t done) {
                return place_for(rank, header, done);
            },
            [&](FrameHeader const& header) { take(rank, header); }
        );
    } catch (ProtocolError const&) {
        makes_sense = false;
    }
    if (!makes_sense) {
        lose(
            rank,
            {FailureKind::communication,
             {rank},
             concat("rank ", rank, " sent what no rank sends: is it this version of joinable?")}
        );
    } else if (one.has_ended) {
        lose(rank, reason_of_leaving(rank));
    } else if (!goes_on) {
        lose_connection(rank);
    } else {
        flush(one);
    }
}

JOINABLE_DEFINITION void Hub::lose_connection(int rank) {
    lose(
        rank,
        {FailureKind::peer_failed,
         {rank},
         concat(
             "rank ",
             rank,
             " failed: its connection broke: its process died, or its machine is out of reach"
         )}
    );
}

JOINABLE_DEFINITION std::span<std::byte>
Hub::place_for(int rank, FrameHeader const& header, std::uint64_t done) {
    Member& one = member(rank);
    if (done == 0) {
        if (!can_say(rank, header)) {
            throw ProtocolError{};
        }
        one.consumed = header.consumed;
    }
    if (header.kind != FrameKind::arrival) {
        return room_in(one.body, header.bytes, done);
    }
    if (!end_) {
        return collectives_.place(header, rank, done);
    }
    return room_in(one.body, (std::min<std::uint64_t>)(header.bytes - done, 65'536), 0);
}

JOINABLE_DEFINITION bool Hub::can_say(int rank, FrameHeader const& header) {
    Member const& one = member(rank);
    if (one.has_ended || header.consumed < one.consumed || header.consumed > one.outbox.sent()) {
        return false;
    }
    bool const is_asked_for = end_ || header.sequence == meeting ||
                              is_wait_for_rank(header.sequence, size()) ||
                              collectives_.has_arrived(header.sequence, rank);
    switch (header.kind) {
    case FrameKind::arrival:
        return end_ ? header.bytes <= most_frame_bytes
                    : !handshakes_ && collectives_.is_arrival(header, rank);
    case FrameKind::abort: return header.bytes <= most_told_bytes;
    case FrameKind::overdue:
        return header.bytes <= most_told_bytes && is_asked_for &&
               header.count <=
                   static_cast<std::uint64_t>((std::numeric_limits<std::int64_t>::max)());
    case FrameKind::question: return header.bytes == 0 && is_asked_for;
    case FrameKind::leave:
    case FrameKind::keep_alive:
    case FrameKind::credit: return header.bytes == 0;
    default: return false;
    }
}

JOINABLE_DEFINITION void Hub::take(int rank, FrameHeader const& header) {
    std::vector<std::byte> const& body = member(rank).body;
    switch (header.kind) {
    case FrameKind::arrival:
        // An arrival that began before the end does not count.
        if (!end_) {
            collectives_.arrive(header, rank);
        }
        // Complete it now: the next frame of this rank may end all.
        while (!end_ && collectives_.is_complete()) {
            finish_collective();
        }
        break;
    case FrameKind::abort:
        if (auto reason = unpacked_reason(body)) {
            end(std::move(*reason));
            break;
        }
        throw ProtocolError{};
    case FrameKind::leave: member(rank).has_ended = true; break;
    case FrameKind::keep_alive: member(rank).alive_at = Clock::now(); break;
    case FrameKind::overdue: overdue_.push_back({rank, header, unpacked_text(body)}); break;
    case FrameKind::question:
        if (!end_) { // which answers it
            answer(rank, header.sequence);
        }
        break;
    default: break;
    }
}

JOINABLE_DEFINITION void
Hub::judge(int rank, FrameHeader const& header, std::string const& meanwhile) {
    if (end_ || is_finished(header.sequence)) {
        return; // its answer is on the way
    }
    auto const deadline = std::chrono::nanoseconds{static_cast<std::int64_t>(header.count)};
    std::vector<int> overdue = missing(header.sequence);
    auto const left =
        take_ranks_at_work(overdue, deadline, [&](int other) { return member(other).alive_at; });
    if (!overdue.empty()) {
        bool const is_meeting = header.sequence == meeting;
        char const* const to_do = is_meeting ? "connect" : "arrive";
        AbortReason reason = reason_of_delay(overdue, to_do, deadline, rank, meanwhile);
        if (std::string const why = is_meeting ? handshakes_->obstacle() : ""; !why.empty()) {
            reason.message = concat(
                "rank 0 could not accept the connections of ",
                ranks_text(overdue),
                " within ",
                std::chrono::duration<double>(deadline).count(),
                " s: ",
                why
            );
        }
        end(std::move(reason));
        return;
    }
    auto const count = static_cast<std::uint64_t>(left.count());
    send(rank, {.kind = FrameKind::wait, .sequence = header.sequence, .count = count});
}

JOINABLE_DEFINITION void Hub::answer(int rank, std::uint64_t sequence) {
    std::vector<int> const ranks = is_finished(sequence) ? std::vector<int>{} : missing(sequence);
    send(rank, {.kind = FrameKind::answer, .sequence = sequence}, std::as_bytes(std::span{ranks}));
}

JOINABLE_DEFINITION std::vector<int> Hub::missing(std::uint64_t sequence) const {
    if (is_wait_for_rank(sequence, size())) {
        return {static_cast<int>(meeting - 1 - sequence)};
    }
    if (sequence != meeting) {
        return collectives_.missing(sequence);
    }
    return ranks_where(size(), [&](int rank) { return !members_[as_index(rank)].has_come; });
}

JOINABLE_DEFINITION void Hub::send(int rank, FrameHeader header, std::span<std::byte const> body) {
    Member& one = member(rank);
    if (!is_linked(rank)) {
        return;
    }
    header.bytes = body.size();
    header.consumed = one.inbox.consumed();
    one.outbox.send(one.socket, bytes_of(header), body, one.limit());
}

JOINABLE_DEFINITION void Hub::flush(Member& one) {
    if (one.socket.is_open()) {
        one.outbox.flush(one.socket, leaving_ ? Outbox::no_limit : one.limit());
    }
}

JOINABLE_DEFINITION void Hub::finish_collective() {
    if (auto const reason = collectives_.disagreement()) {
        end(*reason);
        return;
    }
    collectives_.finish([this](int rank, std::uint64_t sequence, std::span<std::byte const> body) {
        send(rank, {.kind = FrameKind::result, .sequence = sequence}, body);
    });
}

JOINABLE_DEFINITION void Hub::end(AbortReason reason) {
    if (!end_) {
        end_ = std::move(reason);
        untold_ = size();
    }
    for (; untold_ > 0; --untold_) {
        send_end(untold_ - 1);
    }
}

JOINABLE_DEFINITION void Hub::look_into_lobby() {
    if (handshakes_) {
        handshakes_->poll(
            [this](int rank) { return member(rank).has_come; },
            [this](int rank, Socket socket) { admit(rank, std::move(socket)); }
        );
    }
}

JOINABLE_DEFINITION void Hub::admit(int rank, Socket socket) {
    Member& one = member(rank);
    one.socket = std::move(socket);
    one.watch = SilenceWatch{limits_.silence};
    one.has_come = true;
    if (end_) {
        untold_ = rank + 1; // if the memory runs out meanwhile
        send_end(rank);
        untold_ = 0;
    }
}

JOINABLE_DEFINITION void Hub::start_if_all_are_here() {
    if (end_ || !handshakes_ || !missing(meeting).empty()) {
        return;
    }
    handshakes_.reset();
    for (int rank = size(); rank-- > 0;) {
        send(rank, {.kind = FrameKind::start});
    }
}

JOINABLE_DEFINITION void Hub::lose(int rank, AbortReason const& reason) {
    member(rank).socket.close();
    end(reason);
    if (rank == 0 && !leaving_) {
        begin_to_leave();
    }
}

JOINABLE_DEFINITION void Hub::begin_to_leave() {
    leaving_ = end_of_wait(limits_.patience);
    look_into_lobby(); // late ranks learn why all ended, not that no rank 0 listens
    handshakes_.reset();
}

JOINABLE_DEFINITION bool Hub::is_over() {
    bool is_over = true;
    std::uint64_t delivered = 0;
    for (Member& one : members_) {
        if (!one.socket.is_open()) {
            continue;
        }
        flush(one);
        if (one.outbox.is_empty()) {
            one.socket.end_sending();
        }
        std::size_t const left = one.socket.undelivered();
        if (one.outbox.is_empty() && left == 0) {
            one.socket.close();
            continue;
        }
        delivered += one.outbox.sent() - left;
        is_over = false;
    }
    if (std::exchange(delivered_, delivered) != delivered) { // over a slow connection
        leaving_ = end_of_wait(limits_.patience);
    }
    return is_over || Clock::now() >= *leaving_;
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/tcp/detail/rank.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// Asks what else may end these ranks: the reason, if something has.
using Hear = std::function<std::optional<AbortReason>()>;

/// One rank's side of its connection to the hub. Only post(), waits and tests move frames. A posted
/// frame is sent at once as far as the kernel accepts it.
class TcpRank : public HasWorks {
public:
    /// `hear` is asked during every wait. Rank 0 is lost if its machine acknowledges nothing for
    /// `limits.silence`.
    TcpRank(
        Socket socket,
        int rank,
        int size,
        std::chrono::nanoseconds deadline,
        Hear hear = {},
        TcpLimits const& limits = {}
    )
        : socket_{std::move(socket)}, watch_{limits.silence}, patience_{limits.patience},
          rank_{rank}, size_{size}, deadline_{deadline}, hear_{std::move(hear)} {}
    TcpRank(TcpRank const&) = delete;
    TcpRank& operator=(TcpRank const&) = delete;
    ~TcpRank() { leave(); }

    [[nodiscard]] int rank() const noexcept { return rank_; }
    [[nodiscard]] int size() const noexcept { return size_; }
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) noexcept {
        return std::exchange(deadline_, deadline);
    }

    /// Returns when all ranks have arrived. `meanwhile` describes this rank's wait.
    void meet(std::string const& meanwhile);

    /// Arrives in the next collective and returns its number.
    std::uint64_t post(Request const& request) { return post(request, request.signature); }
    /// The same for a collective that stands for another one, which errors show.
    std::uint64_t post(Request const& request, Descriptor const& shown);
    [[nodiscard]] bool is_done(std::uint64_t sequence) const noexcept {
        return sequence < finished_;
    }
    /// Whether finish() would return at once. At the deadline it asks the hub, without waiting for
    /// the answer.
    /// @throws as finish() does.
    [[nodiscard]] bool
    test(std::uint64_t sequence, std::chrono::nanoseconds longest_gap = WaitClock::gap_of_tests) {
        if (progress(sequence)) {
            return true;
        }
        check_clock(sequence, longest_gap);
        throw_if_lost(sequence);
        return false;
    }
    /// test() without a deadline.
    [[nodiscard]] bool progress(std::uint64_t sequence);
    void finish(std::uint64_t sequence);

    /// All ranks throw the first reason that reaches the hub. Returns when the hub has reported
    /// which one that is, so that failures caused by this rank's next actions come later. If the
    /// hub does not answer, this rank's own reason counts, and says so.
    void abort(AbortReason const& reason);
    [[nodiscard]] bool is_aborted() {
        poll();
        return over_.has_value();
    }
    [[nodiscard]] std::optional<AbortReason> abort_reason() {
        poll();
        return over_ ? std::optional{reason()} : std::nullopt;
    }
    /// See Communicator.
    void renumber() noexcept { is_renumbered_ = true; }
    [[nodiscard]] bool is_renumbered() const noexcept { return is_renumbered_; }

    void keep_alive();
    /// A wait for `peer` beside the collectives has lasted for the deadline. Returns how much longer
    /// it may last, because that rank has said that it is at work. Waits for the hub's answer.
    /// @throws TimedOut
    [[nodiscard]] std::chrono::nanoseconds ask_about(int peer, std::string const& meanwhile);

    /// The ranks that have not arrived in the oldest collective that is unfinished here.
    [[nodiscard]] std::vector<int> missing_ranks();

private:
    using Clock = std::chrono::steady_clock;
    static constexpr std::chrono::milliseconds between_questions{10}; ///< of hear_

    /// A question to the hub at the deadline of a wait: how much longer may it last?
    struct Overdue {
        bool is_asked = false;                             ///< without an answer yet
        std::chrono::nanoseconds deadline = {};            ///< of the question
        std::optional<std::chrono::nanoseconds> left = {}; ///< its answer
        WaitClock clock = {};                              ///< since it is asked: of the answer
        std::uint64_t consumed = 0;                        ///< when last asked, or last seen alive
    };
    struct Pending {
        Descriptor signature;
        Descriptor shown;
        Buffer out;
        Overdue overdue = {};
    };

    [[nodiscard]] std::uint64_t next() const noexcept { return finished_ + pending_.size(); }
    /// Null if no wait for it is possible.
    [[nodiscard]] Overdue* overdue_of(std::uint64_t sequence) noexcept;
    /// @pre over_
    [[nodiscard]] AbortReason reason() const {
        AbortReason reason = *over_;
        reason.is_renumbered = is_renumbered_;
        return reason;
    }
    void throw_if_over(bool is_done) const;
    /// The same for a collective that is about to begin, which the error shows.
    void throw_if_over(Descriptor const& shown) const {
        if (over_) {
            throw_failure(in_words_of(rank_, shown.text(), reason()));
        }
    }
    /// The same for one that is posted.
    void throw_if_lost(std::uint64_t sequence) const {
        if (!is_done(sequence)) {
            throw_if_over(pending_[sequence - finished_].shown);
        }
    }

    /// Whether the meeting, or a collective, is over.
    [[nodiscard]] bool is_ready(std::uint64_t sequence) const noexcept {
        return sequence == meeting ? has_started_ : is_done(sequence);
    }
    /// Waits until it is ready, until the group has ended, or until the hub ends it. The hub does
    /// that when it is asked at the deadline.
    void wait_until_ready(std::uint64_t sequence);
    /// Calls `step(end)`, which may wait until then, as long as it returns true and the hub is
    /// alive: until the patience has passed since the last byte that moved: received by the hub's
    /// machine, or read by inbox_. Looks once more after that, because this process may have been
    /// stopped.
    template <class Step>
    void while_hub_is_alive(Step const& step) {
        auto const moved = [this] {
            return outbox_.sent() - socket_.undelivered() + inbox_.consumed();
        };
        std::uint64_t before = moved();
        for (auto end = end_of_wait(patience_); !is_alone_;) {
            bool const is_late = Clock::now() >= end;
            if (!step(end)) {
                return;
            }
            if (std::uint64_t const now = moved(); std::exchange(before, now) != now) {
                end = end_of_wait(patience_);
            } else if (is_late) {
                return;
            }
        }
    }
    /// Waits for the hub until `ready()` or until the group has ended.
    template <class Ready>
    void pump_until(Ready const& ready) {
        while_hub_is_alive([&](TimePoint end) {
            bool const goes_on = !over_ && !ready();
            if (goes_on) {
                pump(end);
            }
            return goes_on;
        });
    }
    /// For a wait that finds nothing: at the deadline asks the hub how much longer it may last, and gives up on a
    /// hub that does not answer within the patience. Returns for how long a wait that blocks may sleep.
    std::chrono::nanoseconds
    check_clock(std::uint64_t sequence, std::chrono::nanoseconds longest_gap);
    [[nodiscard]] std::string waiting_text(std::uint64_t sequence) const {
        return sequence == meeting ? meeting_text_
                                   : "waits in " + pending_[sequence - finished_].shown.text();
    }
    /// Tells the hub that the deadline has passed. The hub ends all ranks or answers how much
    /// longer to wait.
    /// @pre overdue_of(sequence) is not null
    void ask_for_more(std::uint64_t sequence, std::string const& meanwhile);
    /// Rank 0 is stopped or unreachable, so this rank can learn nothing more.
    void give_up(std::string const& meanwhile);

    // -- moving -----------------------------------------------------------------------------------

    void send(FrameHeader header, std::span<std::byte const> body = {});
    /// Does what is possible now. If that is nothing, waits until something is, or until `end`.
    void pump(TimePoint end);
    /// Does what is possible now.
    /// @throws ContractViolation  this process was forked since the rank attached.
    void poll();

    /// Rank 0 broke the protocol. Ends all ranks, if rank 0 still tells them.
    void refuse(ProtocolError const& error);

    [[nodiscard]] std::span<std::byte> place_for(FrameHeader const& header, std::uint64_t done);
    /// The size of this rank's result in its oldest collective.
    [[nodiscard]] std::size_t bytes_of_result() const noexcept;
    /// @throws ProtocolError  the hub may not send this frame now.
    void require_expected(FrameHeader const& header);
    /// @pre require_expected(header) was called
    void take(FrameHeader const& header);

    /// Announces that this rank sends no more, and waits briefly until the hub has received
    /// everything: closing the connection earlier could destroy data.
    void leave() noexcept;

    Socket socket_;
    SilenceWatch watch_;
    std::chrono::nanoseconds patience_; ///< with rank 0
    int rank_;
    int size_;
    bool is_renumbered_ = false;
    std::chrono::nanoseconds deadline_;
    Hear hear_;
    Inbox inbox_;
    Outbox outbox_;
    std::vector<std::byte> body_; ///< of a frame that is not a result
    std::uint64_t told_ = 0;      ///< how much of the consumed bytes was reported
    bool has_started_ = false;
    std::string meeting_text_;    ///< describes the wait for that
    std::deque<Pending> pending_; ///< posted and unfinished
    std::uint64_t finished_ = 0;
    bool is_alone_ = false;                 ///< the hub no longer answers
    std::optional<AbortReason> own_reason_; ///< this rank's own abort
    std::optional<AbortReason> over_; ///< the error of every wait that did not complete before
    Overdue overdue_;                 ///< for the meeting, and for ask_about()
    int questions_ = 0;               ///< without an answer yet
    bool has_answer_ = false;
    std::vector<int> missing_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/tcp/detail/impl/rank.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>
#include <array>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void TcpRank::meet(std::string const& meanwhile) {
    meeting_text_ = meanwhile;
    wait_until_ready(meeting);
    throw_if_over(has_started_);
}

JOINABLE_DEFINITION std::uint64_t TcpRank::post(Request const& request, Descriptor const& shown) {
    require_here(rank_);
    Descriptor const& signature = request.signature;
    while (pending_.size() == most_in_flight) {
        finish(finished_);
    }
    throw_if_over(shown);
    FrameHeader header;
    header.kind = FrameKind::arrival;
    header.collective = signature.collective;
    header.dtype = signature.dtype;
    header.op = signature.op;
    header.root = signature.root;
    header.count = signature.count;
    header.sequence = next();
    std::uint64_t const sequence = next();
    pending_.push_back({signature, shown, request.out});
    ConstBuffer const& in = request.in;
    try {
        send(header, std::span{static_cast<std::byte const*>(in.data), in.bytes()});
    } catch (...) { // without memory nothing was sent
        pending_.pop_back();
        throw;
    }
    return sequence;
}

JOINABLE_DEFINITION bool TcpRank::progress(std::uint64_t sequence) {
    if (!is_done(sequence)) {
        poll();
        throw_if_lost(sequence);
    }
    return is_done(sequence);
}

JOINABLE_DEFINITION void TcpRank::finish(std::uint64_t sequence) {
    wait_until_ready(sequence);
    throw_if_lost(sequence);
}

JOINABLE_DEFINITION void TcpRank::abort(AbortReason const& reason) {
    if (is_aborted()) {
        return;
    }
    own_reason_ = reason;
    send({.kind = FrameKind::abort}, packed(reason));
    pump_until([] { return false; });
    if (!over_) {
        over_ = reason;
        if (!std::exchange(is_alone_, true)) {
            over_->message += concat(
                "; rank 0, where the ranks meet, did not answer this within ",
                std::chrono::duration<double>(patience_).count(),
                " s, so the others may not know"
            );
        }
    }
}

JOINABLE_DEFINITION void TcpRank::keep_alive() {
    require_here(rank_);
    outbox_.flush(socket_);
    if (outbox_.is_empty()) { // else the hub accepts nothing now; the next call will do
        send({.kind = FrameKind::keep_alive});
    }
}

JOINABLE_DEFINITION std::vector<int> TcpRank::missing_ranks() {
    poll();
    if (pending_.empty() || over_) {
        return {};
    }
    std::uint64_t const oldest = finished_;
    send({.kind = FrameKind::question, .sequence = oldest});
    ++questions_;
    missing_ = {0}; // if the hub does not answer
    has_answer_ = false;
    pump_until([this] { return has_answer_; });
    return over_ || is_done(oldest) ? std::vector<int>{} : missing_;
}

JOINABLE_DEFINITION std::chrono::nanoseconds
TcpRank::ask_about(int peer, std::string const& meanwhile) {
    overdue_ = {};
    ask_for_more(wait_for_rank(peer), meanwhile);
    pump_until([this] { return overdue_.left.has_value(); });
    if (!overdue_.left && !over_) {
        give_up(meanwhile);
    }
    throw_if_over(false);
    return *overdue_.left;
}

JOINABLE_DEFINITION TcpRank::Overdue* TcpRank::overdue_of(std::uint64_t sequence) noexcept {
    if (sequence == meeting || is_wait_for_rank(sequence, size_)) {
        return &overdue_;
    }
    bool const is_pending = sequence >= finished_ && sequence < next();
    return is_pending ? &pending_[sequence - finished_].overdue : nullptr;
}

JOINABLE_DEFINITION void TcpRank::throw_if_over(bool is_done) const {
    if (!is_done && over_) {
        throw_failure(reason());
    }
}

JOINABLE_DEFINITION void TcpRank::wait_until_ready(std::uint64_t sequence) {
    poll();
    if (Overdue* const overdue = overdue_of(sequence); overdue != nullptr && !overdue->is_asked) {
        overdue->clock = {}; // not the time of earlier tests
    }
    while (!over_ && !is_ready(sequence)) {
        pump(end_of_wait(check_clock(sequence, WaitClock::gap_of_waits)));
    }
}

JOINABLE_DEFINITION std::chrono::nanoseconds
TcpRank::check_clock(std::uint64_t sequence, std::chrono::nanoseconds longest_gap) {
    Overdue& overdue = *overdue_of(sequence);
    if (overdue.left) {
        overdue.clock.extend(deadline_, *std::exchange(overdue.left, std::nullopt));
    }
    if (overdue.is_asked &&
        std::exchange(overdue.consumed, inbox_.consumed()) != inbox_.consumed()) {
        overdue.clock = {}; // the hub is alive
    }
    std::chrono::nanoseconds const most = overdue.is_asked ? patience_ : deadline_;
    if (!overdue.clock.reaches(most, longest_gap)) {
        return overdue.clock.nap(most);
    }
    if (overdue.is_asked) {
        give_up(waiting_text(sequence));
    } else {
        ask_for_more(sequence, waiting_text(sequence));
        overdue.clock = {};
        overdue.consumed = inbox_.consumed();
    }
    return std::chrono::nanoseconds{0};
}

JOINABLE_DEFINITION void
TcpRank::ask_for_more(std::uint64_t sequence, std::string const& meanwhile) {
    std::string const text = cut_text(meanwhile, most_reason_text);
    Overdue& overdue = *overdue_of(sequence);
    overdue.deadline = (std::max)(deadline_, std::chrono::nanoseconds{0});
    auto const count = static_cast<std::uint64_t>(overdue.deadline.count());
    send(
        {.kind = FrameKind::overdue, .sequence = sequence, .count = count},
        std::as_bytes(std::span{text})
    );
    overdue.is_asked = true;
}

JOINABLE_DEFINITION void TcpRank::give_up(std::string const& meanwhile) {
    is_alone_ = true;
    abort(reason_of_delay(
        {0}, "answer for all ranks, which meet there,", deadline_ + patience_, rank_, meanwhile
    ));
}

JOINABLE_DEFINITION void TcpRank::send(FrameHeader header, std::span<std::byte const> body) {
    header.bytes = body.size();
    header.consumed = inbox_.consumed();
    outbox_.send(socket_, bytes_of(header), body);
    told_ = header.consumed;
}

JOINABLE_DEFINITION void TcpRank::pump(TimePoint end) {
    std::uint64_t const consumed = inbox_.consumed();
    poll();
    if (!over_ && consumed == inbox_.consumed()) {
        auto const events = static_cast<short>(POLLIN | (outbox_.is_empty() ? 0 : POLLOUT));
        if (hear_) {
            if (auto const reason = hear_()) {
                hear_ = nullptr; // abort() waits, too
                abort(*reason);
                return;
            }
            end = (std::min<TimePoint>)(end, Clock::now() + between_questions);
        }
        wait_for(socket_, events, (std::min)(end, watch_.next_look()));
        poll();
    }
}

JOINABLE_DEFINITION void TcpRank::poll() {
    require_here(rank_);
    if (over_) { // buffers of lost collectives belong to the caller again
        return;
    }
    outbox_.flush(socket_);
    bool goes_on = true;
    try {
        goes_on = inbox_.read(
            socket_,
            [this](FrameHeader const& header, std::uint64_t done) {
                return place_for(header, done);
            },
            [this](FrameHeader const& header) { take(header); }
        );
    } catch (ProtocolError const& error) {
        refuse(error);
    }
    if ((!goes_on || watch_.is_lost(socket_, Clock::now())) && !over_) {
        over_ = own_reason_.value_or(AbortReason{
            FailureKind::peer_failed,
            {0},
            "rank 0 failed: its connection broke: its process died, or its machine is out of "
            "reach"
        });
    }
    if (!over_ && inbox_.consumed() - told_ >= 16'384) {
        send({.kind = FrameKind::credit});
    }
}

JOINABLE_DEFINITION void TcpRank::refuse(ProtocolError const& error) {
    AbortReason const reason{
        FailureKind::communication,
        {0},
        concat("rank 0 sent rank ", rank_, " ", error.what, ": is it this version of joinable?")
    };
    send({.kind = FrameKind::abort}, packed(reason));
    over_ = reason;
}

JOINABLE_DEFINITION std::span<std::byte>
TcpRank::place_for(FrameHeader const& header, std::uint64_t done) {
    if (done == 0) {
        require_expected(header);
    }
    if (header.kind == FrameKind::result && header.bytes != 0) {
        Buffer const& out = pending_.front().out;
        return std::span{static_cast<std::byte*>(out.data), out.bytes()}.subspan(done);
    }
    return room_in(body_, header.bytes, done);
}

JOINABLE_DEFINITION std::size_t TcpRank::bytes_of_result() const noexcept {
    Descriptor const& signature = pending_.front().signature;
    bool const gets_some =
        signature.collective == Collective::all_reduce ||
        (signature.collective == Collective::broadcast && signature.root != rank_);
    return gets_some ? pending_.front().out.bytes() : 0;
}

JOINABLE_DEFINITION void TcpRank::require_expected(FrameHeader const& header) {
    auto const require = [](bool is_expected, auto const&... what) {
        if (!is_expected) {
            throw ProtocolError{concat(what...)};
        }
    };
    auto const require_bytes = [&](std::size_t least, std::size_t most) {
        require(
            header.bytes >= least && header.bytes <= most,
            header.bytes,
            " bytes where ",
            most,
            least == most ? " were expected" : " are the most"
        );
    };
    require(header.consumed <= outbox_.sent(), "word of bytes that it never got");
    Overdue const* const overdue = overdue_of(header.sequence);
    switch (header.kind) {
    case FrameKind::start:
        require(!has_started_, "a second start");
        require_bytes(0, 0);
        break;
    case FrameKind::result:
        require(
            has_started_ && !pending_.empty() && header.sequence == finished_,
            "a result for which it did not ask"
        );
        require_bytes(bytes_of_result(), bytes_of_result());
        break;
    case FrameKind::end: require_bytes(0, most_told_bytes); break;
    case FrameKind::wait:
        require(
            overdue != nullptr && overdue->is_asked && header.count > 0 &&
                header.count <= static_cast<std::uint64_t>(overdue->deadline.count()),
            "more time, for which it did not ask"
        );
        require_bytes(0, 0);
        break;
    case FrameKind::answer:
        require(questions_ > 0, "an answer to no question");
        require_bytes(0, static_cast<std::size_t>(size_) * sizeof(std::int32_t));
        break;
    default: require(false, "a message of the unknown kind ", static_cast<int>(header.kind));
    }
}

JOINABLE_DEFINITION void TcpRank::take(FrameHeader const& header) {
    switch (header.kind) {
    case FrameKind::start: has_started_ = true; break;
    case FrameKind::result:
        pending_.pop_front();
        ++finished_;
        break;
    case FrameKind::end:
        over_ = unpacked_reason(body_);
        if (!over_) {
            throw ProtocolError{"an end without a reason"};
        }
        break;
    case FrameKind::wait: {
        Overdue& overdue = *overdue_of(header.sequence);
        overdue.is_asked = false;
        overdue.left = std::chrono::nanoseconds{static_cast<std::int64_t>(header.count)};
        break;
    }
    case FrameKind::answer: {
        std::vector<int> ranks = unpacked_ranks(body_);
        if (!are_ranks(ranks, size_)) {
            throw ProtocolError{"numbers that are no ranks"};
        }
        has_answer_ = --questions_ == 0;
        if (has_answer_) { // an older question's answer does not count
            missing_ = std::move(ranks);
        }
        break;
    }
    default: break;
    }
}

JOINABLE_DEFINITION void TcpRank::leave() noexcept {
    if (!is_here()) {
        return;
    }
    try {
        send({.kind = FrameKind::leave});
        std::array<std::byte, 4096> ignored{};
        while_hub_is_alive([&](TimePoint end) {
            outbox_.flush(socket_);
            auto got = socket_.receive(ignored);
            for (int more = 1000; got.value_or(0) != 0 && more > 0; --more) {
                got = socket_.receive(ignored);
            }
            if (got && *got == 0) {
                auto const events = static_cast<short>(POLLIN | (outbox_.is_empty() ? 0 : POLLOUT));
                wait_for(socket_, events, end);
            }
            return got.has_value();
        });
    } catch (...) { // NOLINT(bugprone-empty-catch): the hub sees the closed connection
    }
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/tcp/options.hpp

namespace joinable { inline namespace v0 {

/// One rank of a group on several machines, for TcpCommunicator::attach. Everything but the rank is
/// the same on all ranks.
///
/// The secret keeps out programs that reach the port of rank 0 without knowing it: ranks of other
/// jobs, port scanners, and users of the same machines. It is sent in plain text; nothing is
/// encrypted or signed.
/// - A program that reads the network learns the secret and sees the data.
/// - A program that changes network traffic can forge both.
/// - A program that takes the port before rank 0 listens there receives the secret.
///
/// The values computed by a rank that has the secret are trusted. Messages from ranks and from rank
/// 0 are checked: at worst they end the job or give it wrong numbers. Use it in a network that you
/// trust, or within a tunnel.
struct TcpOptions {
    int rank = 0;
    int size = 1;
    std::string job;        ///< no other group at this port may use it meanwhile; up to 1024 bytes
    std::string address;    ///< of rank 0's machine: a name, or an IPv4 or IPv6 address
    std::uint16_t port = 0; ///< on which rank 0 listens
    std::string secret;     ///< rank 0 rejects ranks without it; up to 1024 bytes
    std::chrono::nanoseconds connect_timeout = default_deadline; ///< for attach()
    std::chrono::nanoseconds deadline = default_deadline;        ///< for all waits after that
    /// How long this rank waits beyond that for rank 0, which normally answers at once: when it asks
    /// at a deadline who is missing, aborts, or leaves. It counts from the last byte that moved; in
    /// a wait or a test after its deadline, from the last one that came. Shorter ends a job sooner
    /// whose rank 0 is stopped; longer keeps one whose rank 0 is on a busy machine.
    std::chrono::nanoseconds patience = std::chrono::seconds{5};
};

/// Reads what the launcher of this process says (see launch_environment()). JOINABLE_ADDR and
/// JOINABLE_PORT say where rank 0 is; without them MASTER_ADDR and MASTER_PORT do. JOINABLE_SECRET
/// is the secret. torchrun itself may listen at MASTER_PORT, as TORCHELASTIC_USE_AGENT_STORE tells;
/// its ranks then need JOINABLE_PORT. `lookup(name)` returns the value of a variable, or null if it
/// is not set.
/// @throws ContractViolation  variables are missing, are not numbers, or contradict each other;
///                            torchrun listens at the port.
template <class Lookup>
[[nodiscard]] TcpOptions tcp_environment(Lookup const& lookup) {
    auto const text = [&](char const* name) {
        char const* const value = lookup(name);
        return value == nullptr ? std::string_view{} : std::string_view{value};
    };
    auto const require = [&](char const* own, char const* name, std::string_view what) {
        char const* const set = text(own).empty() ? name : own;
        if (text(set).empty()) {
            throw ContractViolation{detail::concat(
                "expected ",
                what,
                " in ",
                name,
                ", but it is not set; set it on all ranks of the job"
            )};
        }
        return set;
    };
    LaunchEnvironment const launch = launch_environment(lookup);
    TcpOptions options;
    options.rank = launch.rank;
    options.size = launch.size;
    options.job = launch.job;
    options.address = text(require("JOINABLE_ADDR", "MASTER_ADDR", "the machine of rank 0"));
    char const* const name = require("JOINABLE_PORT", "MASTER_PORT", "a free port of that machine");
    if (text("JOINABLE_PORT").empty() && text("TORCHELASTIC_USE_AGENT_STORE") == "True") {
        throw ContractViolation{
            "MASTER_PORT is that of torchrun's own store: set JOINABLE_PORT to a free port of rank "
            "0's machine, on all ranks"
        };
    }
    std::string_view const port = text(name);
    auto const [end, error] = std::from_chars(port.data(), port.data() + port.size(), options.port);
    if (error != std::errc{} || end != port.data() + port.size() || options.port == 0) {
        throw ContractViolation{detail::concat(
            "expected a port from 1 to 65535 in ", name, ", but it is \"", port, "\""
        )};
    }
    options.secret = text(require(
        "JOINABLE_SECRET",
        "JOINABLE_SECRET",
        "a text that nobody else knows, as openssl rand -hex 16 makes one,"
    ));
    return options;
}
[[nodiscard]] inline TcpOptions tcp_environment() {
    return tcp_environment(detail::ProcessEnvironment{});
}

namespace detail {
/// Whether a launcher started this process and says where rank 0 is. Local.
[[nodiscard]] inline bool is_launched_with_address() {
    auto const found = own_environment();
    return found.launcher() != nullptr && found.finds_any({"JOINABLE_ADDR", "MASTER_ADDR"});
}
} // namespace detail

}} // namespace joinable::v0

// ---- joinable/communicator/tcp/communicator.hpp

#if !defined(__linux__)
#error "<joinable/tcp.hpp> needs the sockets of Linux; elsewhere ranks are threads"
#endif

namespace joinable { inline namespace v0 {

namespace detail {
class TcpEnd;
} // namespace detail

/// Listens for rank 0 before it attaches. It is for programs that let the system choose a port and
/// tell the other ranks themselves. Ranks that connect before rank 0 attaches wait. A process that is forked
/// before keeps the port, also when this listener is destroyed unused.
class TcpListener {
public:
    /// Listens on a numeric address of this machine, or on "localhost". Any other name may mean a
    /// different address on another machine, so the listener then takes every address of this
    /// machine. Port 0: the system chooses one.
    /// @throws CommunicationError  the port is in use, or the address is not of this machine.
    explicit TcpListener(std::string const& address, std::uint16_t port = 0)
        : socket_{detail::listen_at(address, port)} {}

    [[nodiscard]] std::uint16_t port() const noexcept {
        sockaddr_storage at{};
        socklen_t size = sizeof at;
        ::getsockname(socket_.handle(), reinterpret_cast<sockaddr*>(&at), &size);
        return ntohs(
            at.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6 const&>(at).sin6_port
                                     : reinterpret_cast<sockaddr_in const&>(at).sin_port
        );
    }

private:
    friend class detail::TcpEnd;
    detail::Socket socket_;
};

/// A collective of ranks that TCP connects.
using TcpWork = detail::WorkOf<detail::TcpRank, std::uint64_t>;

namespace detail {
/// The facts of a rank of another communicator, beside its connection.
struct TcpSurroundings {
    Hear hear = {}; ///< asked in every wait, also while the rank attaches
    /// Where rank 0 is, if not where the options say.
    std::function<std::optional<TcpOptions>(TcpOptions const&)> look = {};
    bool is_renumbered = false; ///< see Communicator
};

/// One end of the connections by which ranks meet: the rank, and on rank 0 the hub. It is a TcpCommunicator, or it stands
/// beside the other connections of a transport.
class TcpEnd : public RankMembers<TcpEnd>, public BasicCollectives<TcpEnd, TcpWork> {
public:
    /// Collective; blocks until all ranks have met. Only rank 0 may have a listener.
    /// @throws as TcpCommunicator::attach.
    TcpEnd(
        TcpOptions const& options,
        std::optional<TcpListener> listener = std::nullopt,
        TcpSurroundings const& around = {}
    );
    TcpEnd(TcpEnd const&) = delete;
    TcpEnd& operator=(TcpEnd const&) = delete;
    ~TcpEnd();

    /// Posts a request. Errors show `shown`: a collective of another transport for which it stands.
    TcpWork post(Request const& request, Descriptor const& shown);
    TcpWork post(Request const& request) { return post(request, request.signature); }
    [[nodiscard]] TcpRank& own_rank() const noexcept { return rank_; }

private:
    /// A rank that has not met the others yet.
    struct Begun {
        BackgroundThread hub; ///< on rank 0, also while that computes
        Socket socket;
        TcpOptions options; ///< with the port that rank 0 listens on
    };

    TcpEnd(Begun begun, TcpSurroundings const& around);
    [[nodiscard]] static Begun begin(
        TcpOptions const& options,
        std::optional<TcpListener> listener,
        TcpSurroundings const& around
    );

    BackgroundThread hub_;
    mutable TcpRank rank_; // asking reads incoming messages
    Unwinding unwinding_;
};
} // namespace detail

/// Ranks are processes or threads on any machines. There is one object in each, connected by TCP to
/// rank 0. It is for the roll calls of a guard and other small collectives, next to a communicator
/// that moves gradients.
///
/// Collectives behave like those of ThreadCommunicator and give bitwise identical results. They are
/// asynchronous, combine in rank order, and are compared across ranks; up to 64 may be in flight.
/// Each buffer goes to rank 0, where a separate thread combines it, and back. One place thus
/// decides which collectives complete and why they end, and rank 0 may compute meanwhile. The other
/// ranks have no thread. The kernel takes some ten thousand bytes when a rank posts; the rest is
/// sent when the rank waits, tests or posts.
///
/// An abort, a rank that leaves, and one that dies reach all others at once, even while they
/// compute. abort() returns when rank 0 has reported the winning reason, and missing_ranks() asks
/// it; if it does not answer, both return when the rank's patience has passed since the last byte
/// that moved. A machine that acknowledges nothing for 30 s is out of reach; a process that is
/// stopped is not. Both are noticed at the deadline, too. If rank 0 is stopped, it answers nobody:
/// each rank throws TimedOut after its deadline and then its patience (see TcpOptions). If rank 0
/// dies, a collective may have completed on some ranks only.
///
/// A process that connects must know the secret, which is sent in plain text. It keeps out other
/// jobs and strangers, but nobody who can read the network. All machines must have the same byte
/// order. A process that a rank forks has none of the rank's connections. It says nothing for the rank when
/// it ends, and its calls throw ContractViolation.
///
/// A collective of more than 1 GiB throws ContractViolation before any data moves.
class TcpCommunicator : public detail::TcpEnd {
public:
    static constexpr std::string_view transport = "tcp";
    /// Whether a launcher started this process and says where rank 0 is. Local.
    [[nodiscard]] static bool is_launched() { return detail::is_launched_with_address(); }

    /// Meets the other ranks of the job, which call this too. Returns when all have arrived. Rank 0
    /// listens until then; connections that do not belong to the job disturb no rank.
    /// @throws TimedOut            some ranks, which it names, had not arrived in time.
    /// @throws PeerFailed          a rank died meanwhile.
    /// @throws ContractViolation   the rank is out of range or already taken; rank 0 has
    ///                             another job, secret or world size.
    /// @throws CommunicationError  rank 0 cannot listen there; another program answers, or one with
    ///                             another version of this library; this process may open no more
    ///                             files.
    static TcpCommunicator attach(TcpOptions const& options) { return TcpCommunicator{options}; }
    /// The same for rank 0, with a listener that it has already. The address and port of the
    /// options are ignored.
    /// @throws ContractViolation  also if this is not rank 0.
    static TcpCommunicator attach(TcpListener listener, TcpOptions const& options) {
        return TcpCommunicator{options, std::move(listener)};
    }
    /// Attaches a rank that mpirun, mpiexec, torchrun or srun started; see tcp_environment().
    /// @throws ContractViolation  also if tcp_environment() fails.
    static TcpCommunicator from_environment(std::chrono::nanoseconds deadline = default_deadline) {
        TcpOptions options = tcp_environment();
        options.connect_timeout = deadline;
        options.deadline = deadline;
        return attach(options);
    }

    /// The rank leaves: ranks that wait for it throw PeerFailed. Blocks briefly. If a rank does not
    /// answer, blocks until its patience has passed since that rank received the last byte.
    ~TcpCommunicator() = default;

private:
    using TcpEnd::own_rank, TcpEnd::post; // not for users

    explicit TcpCommunicator(
        TcpOptions const& options, std::optional<TcpListener> listener = std::nullopt
    )
        : TcpEnd{options, std::move(listener)} {}
};

}} // namespace joinable::v0

// ---- joinable/communicator/tcp/detail/connect.hpp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <thread>

namespace joinable { inline namespace v0 { namespace detail {

/// Whether all bytes came before `end`. Also false if the other side has closed, or rank 0 is
/// elsewhere.
[[nodiscard]] inline bool receive_all(
    Socket const& socket,
    std::span<std::byte> into,
    TimePoint end,
    IsElsewhere const& is_elsewhere = {}
) {
    constexpr std::chrono::milliseconds between_questions{100};
    while (!into.empty() && std::chrono::steady_clock::now() < end) {
        auto const got = socket.receive(into);
        if (!got) {
            return false;
        }
        into = into.subspan(*got);
        if (*got == 0) {
            auto const ask_at = std::chrono::steady_clock::now() + between_questions;
            wait_for(socket, POLLIN, is_elsewhere ? (std::min<TimePoint>)(end, ask_at) : end);
            if (is_elsewhere && is_elsewhere()) {
                return false;
            }
        }
    }
    return into.empty();
}

/// Connects a rank to rank 0, which has accepted it. Tries until `end`. Returns a closed socket if
/// rank 0 is elsewhere.
/// @throws TimedOut            no rank 0 listens there or answers.
/// @throws ContractViolation   rank 0 is of another job, or already has that rank.
/// @throws CommunicationError  it is another program, or has another version of this library; this
///                             process may open no more files.
[[nodiscard]] inline Socket connect_rank(
    int rank,
    TcpJob const& job,
    std::string const& address,
    std::uint16_t port,
    TimePoint end,
    IsElsewhere const& is_elsewhere = {},
    bool is_renumbered = false
) {
    for (;;) {
        Socket socket = connect_to(address, port, end, rank, is_elsewhere, is_renumbered);
        if (!socket.is_open()) {
            return socket;
        }
        // It fits into the kernel's buffer, because nothing was sent before. If it does not, no
        // answer comes.
        static_cast<void>(socket.send(hello_of(rank, job)));
        Greeting greeting;
        auto const begin = std::as_writable_bytes(std::span{&greeting, 1});
        if (receive_all(socket, begin, end, is_elsewhere)) {
            if (greeting.magic == Greeting::joinable_magic &&
                greeting.text_bytes <= Greeting::most_text) {
                std::string text(greeting.text_bytes, ' ');
                static_cast<void>(receive_all(socket, std::as_writable_bytes(std::span{text}), end)
                );
                switch (greeting.verdict) {
                case Greeting::Verdict::welcome: return socket;
                case Greeting::Verdict::other_job: throw ContractViolation{text};
                case Greeting::Verdict::other_program: break;
                }
                throw CommunicationError{text};
            }
            if (greeting.magic != Hello::joinable_magic) { // a socket can connect to itself
                throw CommunicationError{concat(
                    "expected rank 0 at ",
                    endpoint_text(address, port),
                    ", but another program answers there: give the job a port that nobody else uses"
                )};
            }
        } else if (std::chrono::steady_clock::now() >= end) {
            throw TimedOut{
                {0},
                concat(
                    "rank 0 did not answer at ",
                    endpoint_text(address, port),
                    " in time, while rank ",
                    rank,
                    " is connected: it has not attached yet, is stopped, or has no open file left "
                    "for this rank; or another program listens there"
                ),
                is_renumbered
            };
        }
        if (is_elsewhere && is_elsewhere()) {
            return {};
        }
        std::this_thread::sleep_for(std::chrono::milliseconds{20}); // closed: space may come
    }
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/tcp/impl/communicator.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>

namespace joinable { inline namespace v0 { namespace detail {

[[nodiscard]] inline TcpLimits limits_of(TcpOptions const& options) {
    TcpLimits limits;
    limits.patience = options.patience;
    return limits;
}
[[nodiscard]] inline TcpJob job_of(TcpOptions const& options) {
    return {options.size, options.job, options.secret};
}
inline void check(TcpOptions const& options) {
    check_own_rank(options.rank, options.size);
    constexpr std::size_t most = TcpJob::most_text;
    if (options.job.size() > most || options.secret.size() > most) {
        throw ContractViolation{concat(
            "expected a job and a secret of at most ",
            most,
            " bytes each, but they have ",
            options.job.size(),
            " and ",
            options.secret.size()
        )};
    }
}

[[nodiscard]] inline Socket connect_to_hub(TcpOptions options, TcpSurroundings const& around) {
    auto const end = end_of_wait(options.connect_timeout);
    for (;;) {
        std::optional<TcpOptions> found;
        Socket socket = connect_rank(
            options.rank,
            job_of(options),
            options.address,
            options.port,
            end,
            [&] {
                if (auto const reason = around.hear ? around.hear() : std::nullopt) {
                    throw_failure(*reason);
                }
                found = around.look ? around.look(options) : std::nullopt;
                return found.has_value();
            },
            around.is_renumbered
        );
        if (socket.is_open()) {
            return socket;
        }
        options = std::move(*found);
    }
}

/// The two ends of the connection between rank 0 and its hub.
[[nodiscard]] inline std::array<Socket, 2> connected_sockets() {
    std::array<Socket, 2> ends; // outlive the pause
    ForkPause const pause;
    int handles[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, handles) != 0) {
        throw CommunicationError{concat("rank 0 cannot connect to itself: ", std::strerror(errno))};
    }
    ends = {Socket{handles[0]}, Socket{handles[1]}};
    for (Socket& end : ends) {
        end.keep_from_children(pause);
    }
    return ends;
}

JOINABLE_DEFINITION TcpEnd::TcpEnd(
    TcpOptions const& options, std::optional<TcpListener> listener, TcpSurroundings const& around
)
    : TcpEnd{begin(options, std::move(listener), around), around} {}

JOINABLE_DEFINITION TcpEnd::Begun TcpEnd::begin(
    TcpOptions const& options, std::optional<TcpListener> listener, TcpSurroundings const& around
) {
    check(options);
    if (options.rank != 0) {
        if (listener) {
            throw ContractViolation{concat(
                "expected rank 0 to listen, as the others connect to it, but was given rank ",
                options.rank
            )};
        }
        return {{}, connect_to_hub(options, around), options};
    }
    if (!listener) {
        listener.emplace(options.address, options.port);
    }
    TcpOptions found = options;
    found.port = listener->port();
    auto [to_rank, to_hub] = connected_sockets();
    Hub hub{std::move(listener->socket_), std::move(to_rank), job_of(found), limits_of(options)};
    BackgroundThread thread{"the thread where ranks meet", [moved = std::move(hub)]() mutable {
                                moved.run();
                            }};
    return {std::move(thread), std::move(to_hub), std::move(found)};
}

JOINABLE_DEFINITION TcpEnd::TcpEnd(Begun begun, TcpSurroundings const& around)
    : hub_{std::move(begun.hub)}, rank_{
                                      std::move(begun.socket),
                                      begun.options.rank,
                                      begun.options.size,
                                      begun.options.connect_timeout,
                                      around.hear,
                                      limits_of(begun.options)
                                  } {
    if (around.is_renumbered) {
        rank_.renumber();
    }
    rank_.meet(concat(
        "waits for all ranks at ",
        endpoint_text(begun.options.address, begun.options.port),
        ": start all ranks of a job, with the same address, port and secret"
    ));
    rank_.set_deadline(begun.options.deadline);
}

JOINABLE_DEFINITION TcpEnd::~TcpEnd() {
    if (unwinding_.has_begun()) {
        abort_for_exception(rank_, "the scope of its communicator");
    }
}

JOINABLE_DEFINITION TcpWork TcpEnd::post(Request const& request, Descriptor const& shown) {
    Descriptor const& signature = request.signature;
    if (signature.count > most_frame_bytes / size_of(signature.dtype)) {
        throw ContractViolation{concat(
            "a collective by TCP moves at most ",
            most_frame_bytes,
            " bytes, but was given ",
            signature.count,
            " elements of ",
            name_of(signature.dtype),
            ": it is for small messages"
        )};
    }
    return {rank_, rank_.post(request, shown)};
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/tcp.hpp

/// @file
/// Small collectives between machines, without MPI: a control communicator for guards whose
/// gradients are moved by another library. Needs the sockets of Linux and no other library.
