// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include <joinable/communicator/tcp/detail/socket.hpp>
#include <joinable/config.hpp>

#include <cstring>
#include <netdb.h>

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

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/tcp/detail/impl/address.ipp>
#endif
