// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/tcp/communicator.hpp>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>

#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/own_rank.hpp>
#include <joinable/communicator/tcp/detail/connect.hpp>
#include <joinable/detail/text.hpp>

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
