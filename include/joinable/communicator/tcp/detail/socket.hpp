// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <optional>

#include <joinable/communicator/detail/socket.hpp>
#include <joinable/config.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// How long one end of a connection waits for the other.
struct TcpLimits {
    /// For what normally takes no time: an answer of rank 0, a handshake, the last bytes of a rank
    /// that leaves.
    std::chrono::nanoseconds patience = std::chrono::seconds{5};
    /// How long another machine may acknowledge nothing before it counts as lost.
    std::chrono::nanoseconds silence = std::chrono::seconds{30};
};

/// The settings of every connection between ranks. Small messages are sent at once. While nothing is
/// on its way, the kernel notices an unreachable machine after 30 s; SilenceWatch notices it
/// otherwise.
void prepare_connection(Socket const& socket);

/// Whether the other machine has not answered the data or the probe that was sent last, and for how
/// long no acknowledgement has come from it.
struct Acknowledgement {
    bool is_due = false;
    std::chrono::nanoseconds age = {};
};
[[nodiscard]] Acknowledgement acknowledgement_of(Socket const& socket) noexcept;

/// Notices that the other machine of a connection is lost: for `limit` it has acknowledged nothing,
/// although an acknowledgement was due all that time. The kernel of a program that is stopped, or
/// does not read, answers the probes of its shut window; TCP_USER_TIMEOUT would end that connection,
/// too. Such probes come up to 2 min apart, so meanwhile a loss is noticed later.
class SilenceWatch {
public:
    explicit SilenceWatch(std::chrono::nanoseconds limit = TcpLimits{}.silence) noexcept
        : limit_{limit} {}

    [[nodiscard]] TimePoint next_look() const noexcept { return next_; }
    /// Looks when it is time. Bytes acknowledged between two looks count, so nothing is
    /// lost because this process looks late.
    [[nodiscard]] bool is_lost(Socket const& socket, TimePoint now) noexcept;

private:
    std::chrono::nanoseconds limit_;
    TimePoint next_ = {};
    std::optional<TimePoint> silent_since_; ///< the first look that found something due
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/tcp/detail/impl/socket.ipp>
#endif
