// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <charconv>
#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <system_error>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/environment.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

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
