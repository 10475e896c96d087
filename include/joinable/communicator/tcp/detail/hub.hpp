// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <joinable/communicator/tcp/detail/collectives.hpp>
#include <joinable/communicator/tcp/detail/frame.hpp>
#include <joinable/communicator/tcp/detail/handshake.hpp>
#include <joinable/communicator/tcp/detail/handshake_server.hpp>
#include <joinable/communicator/tcp/detail/socket.hpp>
#include <joinable/config.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Where all ranks of a group meet: it has a connection to each of them, rank 0 included, and is all
/// that decides whether a collective completes or ends. What it sends reaches every rank in the same
/// order. It shares nothing with rank 0 but that connection.
class Hub {
public:
    /// `listener` is where the ranks connect, `rank_0` the other end of that rank's connection.
    Hub(Socket listener, Socket rank_0, TcpJob job);

    /// Returns when rank 0 has left and the others have, or can still get, what was sent to them.
    void run() noexcept {
        try {
            start_if_all_are_here();
            while (serve()) {
            }
        } catch (...) { // there is no memory: all connections end, which all ranks notice
            members_.clear();
        }
    }

private:
    using Clock = std::chrono::steady_clock;

    struct Member {
        Socket socket = {};
        Inbox inbox = {};
        Outbox outbox = {};
        std::vector<std::byte> body = {}; ///< of the frame that is under way, if it is no arrival
        std::uint64_t consumed = 0;       ///< of what was sent to it
        Clock::time_point alive_at = {};
        bool has_come = false;
        bool has_said_all = false; ///< sends nothing any more

        /// A rank that computes reads nothing. So that its kernel always has room for what is under
        /// way, and one that has none is a sign of a lost machine, it gets no more before it reads.
        [[nodiscard]] std::uint64_t limit() const noexcept { return consumed + 49'152; }
    };
    /// What a rank says that has waited for its deadline.
    struct Overdue {
        int rank;
        FrameHeader header;
        std::string meanwhile;
    };

    [[nodiscard]] int size() const noexcept { return static_cast<int>(members_.size()); }
    [[nodiscard]] Member& member(int rank) noexcept {
        return members_[static_cast<std::size_t>(rank)];
    }
    [[nodiscard]] bool is_linked(int rank) noexcept { return member(rank).socket.is_open(); }

    // -- one turn ---------------------------------------------------------------------------------

    /// Waits for something to happen, and deals with it. False: it was the last.
    bool serve();

    void attend_to(int rank);

    // -- what ranks say ---------------------------------------------------------------------------

    std::span<std::byte> place_for(int rank, FrameHeader const& header, std::uint64_t done);

    /// Whether a rank that follows the protocol can say that now. After the end it may not have heard
    /// of the end, and what it asks for is not looked at any more.
    [[nodiscard]] bool can_say(int rank, FrameHeader const& header);

    /// @pre can_say(rank, header)
    void take(int rank, FrameHeader const& header);

    /// A rank has waited for its deadline: that ends all, unless those that it waits for have said
    /// meanwhile that they are at work. @pre what has come of all ranks is read: this process may have
    /// been stopped
    void judge(int rank, FrameHeader const& header, std::string const& meanwhile);

    void answer(int rank, std::uint64_t sequence);

    [[nodiscard]] bool is_finished(std::uint64_t sequence) const noexcept {
        return sequence == meeting ? !handshakes_.has_value() : collectives_.is_finished(sequence);
    }
    [[nodiscard]] std::vector<int> missing(std::uint64_t sequence) const;

    // -- what ranks are told ----------------------------------------------------------------------
    // Rank 0 comes last: what it knows the kernel will deliver to the others, should it die of it.

    void send(int rank, FrameHeader header, std::span<std::byte const> body);
    void flush(Member& one);

    void finish_collective();

    /// The first reason is that of all ranks. Nothing completes after it.
    void end(AbortReason reason);
    void send_end(int rank) {
        FrameHeader header;
        header.kind = FrameKind::end;
        send(rank, header, packed(*end_));
    }

    // -- coming and going -------------------------------------------------------------------------

    void look_into_lobby();
    void admit(int rank, Socket socket);
    void start_if_all_are_here();
    void lose(int rank, AbortReason const& reason);
    /// Rank 0 has left. Whether the others need nothing of this machine any more.
    bool is_over();

    OpenCollectives collectives_;
    std::vector<Member> members_;
    std::optional<HandshakeServer> handshakes_; ///< until all have come
    std::optional<AbortReason> end_;
    std::optional<TimePoint> leaving_; ///< until when, after rank 0 has left
    std::vector<pollfd> polled_;
    std::vector<Overdue> overdue_; ///< to be judged in the next turn
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/tcp/detail/hub.ipp>
#endif
