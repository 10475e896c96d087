// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/tcp/detail/socket.hpp>

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
