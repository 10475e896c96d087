// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdint>

#include <netinet/in.h>
#include <sys/socket.h>

#include <doctest/doctest.h>

#include <joinable/communicator/detail/socket.hpp>

namespace joinable_tests {

/// The port of this end.
inline std::uint16_t port_of(joinable::detail::Socket const& socket) {
    sockaddr_in at{};
    socklen_t size = sizeof at;
    REQUIRE(::getsockname(socket.handle(), reinterpret_cast<sockaddr*>(&at), &size) == 0);
    return ntohs(at.sin_port);
}

/// A port that nobody listens at until a rank 0 does, and that the system gives to nobody else.
class FreePort {
public:
    FreePort() : socket_{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)} {
        socket_.set(SOL_SOCKET, SO_REUSEADDR, 1); // as rank 0 sets it: then both may have it
        sockaddr_in at{};
        at.sin_family = AF_INET;
        REQUIRE(::bind(socket_.handle(), reinterpret_cast<sockaddr*>(&at), sizeof at) == 0);
    }
    [[nodiscard]] std::uint16_t number() const { return port_of(socket_); }

private:
    joinable::detail::Socket socket_;
};

} // namespace joinable_tests
