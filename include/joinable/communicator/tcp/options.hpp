// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <system_error>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/environment.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 {

/// One rank of a group on several machines, for TcpCommunicator::attach. All but the rank is the same
/// on all ranks.
///
/// The secret keeps out programs that reach the port of rank 0 and do not know it: ranks of other jobs,
/// port scanners, users of the same machines. It travels as it is, and nothing is encrypted or signed:
/// a program that reads the network learns it and sees the data, one that changes what passes may forge
/// both, and one that takes the port before rank 0 listens there is sent it. A rank that has the secret
/// is believed what it computes. What it sends is checked, as is what rank 0 sends: neither can do more
/// than end the job or give it wrong numbers. Use it in a network that you trust, else within a tunnel.
struct TcpOptions {
    int rank = 0;
    int size = 1;
    std::string job;        ///< no other group at this port has it meanwhile; up to 1024 bytes
    std::string address;    ///< of the machine of rank 0: a name, or a number of IPv4 or IPv6
    std::uint16_t port = 0; ///< where rank 0 listens
    std::string secret;     ///< a rank that does not have it is turned away; up to 1024 bytes
    std::chrono::nanoseconds connect_timeout = default_deadline; ///< to find each other
    std::chrono::nanoseconds deadline = default_deadline;        ///< of all waits after that
};

/// What the launcher of this process says (see launch_environment()), and where rank 0 is: MASTER_ADDR
/// and MASTER_PORT, or JOINABLE_ADDR and JOINABLE_PORT, which are asked before. JOINABLE_SECRET is the
/// secret. `lookup(name)` returns the value of a variable, null where it is not set.
/// @throws ContractViolation  variables are missing, are no numbers, or contradict each other.
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
    return tcp_environment([](char const* name) { return std::getenv(name); });
}

}} // namespace joinable::v0
