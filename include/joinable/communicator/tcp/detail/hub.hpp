// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <joinable/communicator/detail/ranks.hpp>
#include <joinable/communicator/tcp/detail/collectives.hpp>
#include <joinable/communicator/tcp/detail/frame.hpp>
#include <joinable/communicator/tcp/detail/handshake.hpp>
#include <joinable/communicator/tcp/detail/handshake_server.hpp>
#include <joinable/communicator/tcp/detail/socket.hpp>
#include <joinable/config.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

void check_open_files(std::size_t needed);

/// The meeting place of all ranks of a group. It has a connection to each rank, including rank 0.
/// It alone decides whether a collective completes or ends. Every rank receives its frames in the
/// same order. It shares nothing with rank 0 but that connection.
class Hub {
public:
    /// Ranks connect to `listener`. `rank_0` is the other end of rank 0's connection. A rank whose
    /// machine acknowledges nothing for `limits.silence` is lost.
    /// @throws CommunicationError  this process may not open a file for each other rank.
    Hub(Socket listener, Socket rank_0, TcpJob job, TcpLimits const& limits = {});

    /// Returns when rank 0 has left, and the others have left or have received the frames sent to
    /// them, or have received nothing for the patience.
    void run() noexcept {
        try {
            try {
                start_if_all_are_here();
                while (serve()) {
                }
            } catch (...) { // no memory for one rank's data may be enough for a few words
                end(
                    {FailureKind::communication,
                     {0},
                     "rank 0, where the ranks meet, ran out of memory"}
                );
                begin_to_leave();
                while (serve()) {
                }
            }
        } catch (...) { // all connections close, which all ranks notice
            members_.clear();
        }
    }

private:
    using Clock = std::chrono::steady_clock;

    struct Member {
        Socket socket = {};
        Inbox inbox = {};
        Outbox outbox = {};
        std::vector<std::byte> body = {}; ///< of an incoming frame that is no arrival
        SilenceWatch watch{};
        std::uint64_t consumed = 0; ///< of the bytes sent to it
        Clock::time_point alive_at = {};
        bool has_come = false;
        bool has_ended = false; ///< sends nothing any more

        /// A busy rank reads nothing, so it gets no more than this before it reads again. Its
        /// kernel then has room for the data in flight, unless its buffers are set to be small. So
        /// the window stays open, and the loss of its machine is noticed soon.
        [[nodiscard]] std::uint64_t limit() const noexcept { return consumed + 49'152; }
    };
    /// A report from a rank that has waited for its deadline.
    struct Overdue {
        int rank;
        FrameHeader header;
        std::string meanwhile;
    };

    [[nodiscard]] int size() const noexcept { return static_cast<int>(members_.size()); }
    [[nodiscard]] Member& member(int rank) noexcept { return members_[as_index(rank)]; }
    [[nodiscard]] bool is_linked(int rank) noexcept { return member(rank).socket.is_open(); }

    // -- one turn ---------------------------------------------------------------------------------

    /// Waits for an event and handles it. Returns false after the last one.
    bool serve();

    void attend_to(int rank);
    /// Nothing more comes from a rank that has not left.
    void lose_connection(int rank);

    // -- what ranks say ---------------------------------------------------------------------------

    std::span<std::byte> place_for(int rank, FrameHeader const& header, std::uint64_t done);

    /// Whether a rank that follows the protocol may send this now. After the end, a rank may not
    /// know of the end yet, and its requests are ignored.
    [[nodiscard]] bool can_say(int rank, FrameHeader const& header);

    /// @pre can_say(rank, header)
    void take(int rank, FrameHeader const& header);

    /// A rank has waited for its deadline. That ends all ranks, unless the ranks that it waits for
    /// have called keep_alive() meanwhile. @pre all incoming data was read first, because this
    /// process may have been stopped
    void judge(int rank, FrameHeader const& header, std::string const& meanwhile);

    void answer(int rank, std::uint64_t sequence);

    [[nodiscard]] bool is_finished(std::uint64_t sequence) const noexcept {
        return sequence == meeting
                   ? !handshakes_.has_value()
                   : !is_wait_for_rank(sequence, size()) && collectives_.is_finished(sequence);
    }
    [[nodiscard]] std::vector<int> missing(std::uint64_t sequence) const;

    // -- frames to ranks --------------------------------------------------------------------------
    // Rank 0 comes last: its kernel delivers the others' frames even if rank 0 then dies.

    void send(int rank, FrameHeader header, std::span<std::byte const> body = {});
    void flush(Member& one);

    void finish_collective();

    /// The first reason is the one of all ranks. Nothing completes after it. If the memory runs
    /// out meanwhile, the next call goes on.
    void end(AbortReason reason);
    void send_end(int rank) { send(rank, {.kind = FrameKind::end}, packed(*end_)); }

    // -- coming and going -------------------------------------------------------------------------

    void look_into_lobby();
    void admit(int rank, Socket socket);
    void start_if_all_are_here();
    void lose(int rank, AbortReason const& reason);
    /// From now on nothing is waited for but the delivery of what was sent.
    void begin_to_leave();
    /// Rank 0 has left. Whether the others need nothing more from this machine.
    bool is_over();

    OpenCollectives collectives_;
    std::vector<Member> members_;
    TcpLimits limits_;
    std::optional<HandshakeServer> handshakes_; ///< until all ranks have arrived
    std::optional<AbortReason> end_;
    int untold_ = 0;                   ///< ranks below this one have not been told of it
    std::optional<TimePoint> leaving_; ///< when to stop, after rank 0 has left
    std::uint64_t delivered_ = 0;      ///< of the bytes of all ranks, since then
    std::vector<pollfd> polled_;
    std::vector<int> polled_ranks_; ///< whose connections come first in polled_
    std::vector<Overdue> overdue_;  ///< for the next turn to judge
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/tcp/detail/impl/hub.ipp>
#endif
