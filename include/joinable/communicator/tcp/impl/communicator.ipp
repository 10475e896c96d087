// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/tcp/communicator.hpp>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>

#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/tcp/detail/connect.hpp>
#include <joinable/detail/text.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

[[nodiscard]] inline TcpLimits limits_of(TcpOptions const& options) {
    TcpLimits limits;
    limits.patience = options.patience;
    return limits;
}

} // namespace detail

JOINABLE_DEFINITION TcpCommunicator TcpCommunicator::attach(TcpOptions const& options) {
    return attach(options, std::nullopt, {});
}

JOINABLE_DEFINITION TcpCommunicator
TcpCommunicator::attach(TcpListener listener, TcpOptions const& options) {
    check(options);
    if (options.rank != 0) {
        throw ContractViolation{detail::concat(
            "expected rank 0 to listen, as the others connect to it, but was given rank ",
            options.rank
        )};
    }
    return attach(options, std::move(listener), {});
}

JOINABLE_DEFINITION TcpCommunicator TcpCommunicator::attach(
    TcpOptions const& options,
    std::optional<TcpListener> listener,
    detail::TcpSurroundings const& around
) {
    check(options);
    if (options.rank != 0) {
        return {detail::BackgroundThread{}, connect(options, around), options, around};
    }
    if (!listener) {
        listener.emplace(options.address, options.port);
    }
    TcpOptions found = options;
    found.port = listener->port();
    Ends ends = connected();
    detail::Hub hub{
        std::move(listener->socket_), std::move(ends.hub), job_of(found), detail::limits_of(options)
    };
    detail::BackgroundThread thread{
        "the thread where ranks meet", [moved = std::move(hub)]() mutable { moved.run(); }
    };
    return {std::move(thread), std::move(ends.rank), found, around};
}

JOINABLE_DEFINITION TcpCommunicator::~TcpCommunicator() {
    if (unwinding_.has_begun()) {
        abort_for_exception(rank_, "the scope of its communicator");
    }
}

JOINABLE_DEFINITION TcpCommunicator::TcpCommunicator(
    detail::BackgroundThread hub,
    detail::Socket socket,
    TcpOptions const& options,
    detail::TcpSurroundings const& around
)
    : hub_{std::move(hub)}, rank_{
                                std::move(socket),
                                options.rank,
                                options.size,
                                options.connect_timeout,
                                around.hear,
                                detail::limits_of(options)
                            } {
    if (around.is_renumbered) {
        rank_.renumber();
    }
    rank_.meet(detail::concat(
        "waits for all ranks at ",
        detail::endpoint_text(options.address, options.port),
        ": start all ranks of a job, with the same address, port and secret"
    ));
    rank_.set_deadline(options.deadline);
}

JOINABLE_DEFINITION void TcpCommunicator::check(TcpOptions const& options) {
    detail::check_own_rank(options.rank, options.size);
    constexpr std::size_t most = detail::TcpJob::most_text;
    if (options.job.size() > most || options.secret.size() > most) {
        throw ContractViolation{detail::concat(
            "expected a job and a secret of at most ",
            most,
            " bytes each, but they have ",
            options.job.size(),
            " and ",
            options.secret.size()
        )};
    }
}

JOINABLE_DEFINITION detail::Socket
TcpCommunicator::connect(TcpOptions options, detail::TcpSurroundings const& around) {
    auto const end = detail::end_of_wait(options.connect_timeout);
    for (;;) {
        std::optional<TcpOptions> found;
        detail::Socket socket = detail::connect_rank(
            options.rank,
            job_of(options),
            options.address,
            options.port,
            end,
            [&] {
                if (auto const reason = around.hear ? around.hear() : std::nullopt) {
                    detail::throw_failure(*reason);
                }
                found = around.look ? around.look(options) : std::nullopt;
                return found.has_value();
            }
        );
        if (socket.is_open()) {
            return socket;
        }
        options = std::move(*found);
    }
}

JOINABLE_DEFINITION TcpCommunicator::Ends TcpCommunicator::connected() {
    Ends ends; // outlive the pause
    detail::ForkPause const pause;
    int handles[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, handles) != 0) {
        throw CommunicationError{
            detail::concat("rank 0 cannot connect to itself: ", std::strerror(errno))
        };
    }
    ends = {detail::Socket{handles[0]}, detail::Socket{handles[1]}};
    ends.hub.keep_from_children(pause);
    ends.rank.keep_from_children(pause);
    return ends;
}

JOINABLE_DEFINITION TcpWork
TcpCommunicator::post(detail::Request const& request, detail::Descriptor const& shown) {
    detail::Descriptor const& signature = request.signature;
    if (signature.count > detail::most_frame_bytes / size_of(signature.dtype)) {
        throw ContractViolation{detail::concat(
            "a collective by TCP moves at most ",
            detail::most_frame_bytes,
            " bytes, but was given ",
            signature.count,
            " elements of ",
            name_of(signature.dtype),
            ": it is for small messages"
        )};
    }
    return {rank_, rank_.post(request, shown)};
}

}} // namespace joinable::v0
