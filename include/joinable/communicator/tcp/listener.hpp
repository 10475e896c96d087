// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include <joinable/error.hpp>

#if defined(__linux__) // elsewhere there are no such sockets

#include <joinable/communicator/tcp/detail/address.hpp>
#include <joinable/communicator/tcp/detail/socket.hpp>

namespace joinable { inline namespace v0 {

/// Listens for rank 0 before it attaches. It is for programs that let the system choose a port and
/// tell the other ranks themselves. Ranks that connect before rank 0 attaches wait.
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
    friend class TcpCommunicator;
    detail::Socket socket_;
};

}} // namespace joinable::v0

#endif
