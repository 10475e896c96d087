// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/tcp/detail/address.hpp>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <sys/socket.h>
#include <thread>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

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
