// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <thread>

#include <joinable/communicator/tcp/detail/address.hpp>
#include <joinable/communicator/tcp/detail/handshake.hpp>
#include <joinable/communicator/tcp/detail/socket.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

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
