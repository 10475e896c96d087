// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/tcp/detail/hub.hpp>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fcntl.h>
#include <limits>
#include <string>
#include <sys/resource.h>
#include <utility>

#include <joinable/communicator/detail/deadline.hpp>
#include <joinable/communicator/detail/reasons.hpp>
#include <joinable/detail/text.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// @throws CommunicationError  this process may not open `needed` more files.
/// Complexity: a system call for each file that is open or needed.
JOINABLE_DEFINITION void check_open_files(std::size_t needed) {
    rlimit limit{};
    getrlimit(RLIMIT_NOFILE, &limit);
    std::size_t left = 0;
    for (int file = 0; left < needed && static_cast<rlim_t>(file) < limit.rlim_cur; ++file) {
        left += ::fcntl(file, F_GETFD) == -1 ? 1U : 0U;
    }
    if (left < needed) {
        throw CommunicationError{concat(
            "rank 0 needs an open file for each of ",
            needed,
            " other ranks, but its process may open only ",
            left,
            " more (",
            limit.rlim_cur,
            " in all): raise that limit (ulimit -n)"
        )};
    }
}

JOINABLE_DEFINITION
Hub::Hub(Socket listener, Socket rank_0, TcpJob job, TcpLimits const& limits)
    : collectives_{job.size}, members_(static_cast<std::size_t>(job.size)), limits_{limits} {
    check_open_files(static_cast<std::size_t>(job.size) - 1); // rank 0's own are open
    handshakes_.emplace(std::move(listener), std::move(job), limits_.patience);
    admit(0, std::move(rank_0));
}

JOINABLE_DEFINITION bool Hub::serve() {
    TimePoint next = Clock::now() + std::chrono::hours{1};
    polled_.clear();
    polled_ranks_.clear();
    for (int rank = 0; rank < size(); ++rank) {
        if (!is_linked(rank)) {
            continue; // the system may refuse more entries than a process may have files
        }
        Member const& one = member(rank);
        next = (std::min)(next, one.watch.next_look());
        bool const is_blocked = one.outbox.is_blocked(leaving_ ? Outbox::no_limit : one.limit());
        auto const events = static_cast<short>(POLLIN | (is_blocked ? POLLOUT : 0));
        polled_.push_back({one.socket.handle(), events, 0});
        polled_ranks_.push_back(rank);
    }
    if (handshakes_) {
        handshakes_->poll(polled_);
        next = (std::min)(next, handshakes_->next_look());
    }
    if (leaving_) { // the kernel does not report delivery
        next = (std::min)(*leaving_, Clock::now() + std::chrono::milliseconds{1});
    }
    // Judge overdue ranks one turn later: a rank that seems silent may have sent a sign before the
    // last turn read the report.
    auto const overdue = std::exchange(overdue_, {});
    int const error = wait_for_any(polled_, overdue.empty() ? next : Clock::now());
    if (error != 0 && !leaving_) {
        end(
            {FailureKind::communication,
             {0},
             concat("rank 0 cannot wait for the other ranks: ", std::strerror(error))}
        );
        begin_to_leave();
    }
    for (std::size_t i = 0; i < polled_ranks_.size(); ++i) {
        if (polled_[i].revents != 0) {
            attend_to(polled_ranks_[i]);
        }
    }
    for (int rank = 0; rank < size(); ++rank) {
        Member& one = member(rank);
        if (is_linked(rank) && one.watch.is_lost(one.socket, Clock::now())) {
            lose_connection(rank);
        }
    }
    for (Overdue const& one : overdue) {
        judge(one.rank, one.header, one.meanwhile);
    }
    look_into_lobby();
    start_if_all_are_here();
    return !leaving_ || !is_over();
}

JOINABLE_DEFINITION void Hub::attend_to(int rank) {
    Member& one = member(rank);
    bool goes_on = true;
    bool makes_sense = true;
    try {
        goes_on = one.inbox.read(
            one.socket,
            [&](FrameHeader const& header, std::uint64_t done) {
                return place_for(rank, header, done);
            },
            [&](FrameHeader const& header) { take(rank, header); }
        );
    } catch (ProtocolError const&) {
        makes_sense = false;
    }
    if (!makes_sense) {
        lose(
            rank,
            {FailureKind::communication,
             {rank},
             concat("rank ", rank, " sent what no rank sends: is it this version of joinable?")}
        );
    } else if (one.has_ended) {
        lose(rank, reason_of_leaving(rank));
    } else if (!goes_on) {
        lose_connection(rank);
    } else {
        flush(one);
    }
}

JOINABLE_DEFINITION void Hub::lose_connection(int rank) {
    lose(
        rank,
        {FailureKind::peer_failed,
         {rank},
         concat(
             "rank ",
             rank,
             " failed: its connection broke: its process died, or its machine is out of reach"
         )}
    );
}

JOINABLE_DEFINITION std::span<std::byte>
Hub::place_for(int rank, FrameHeader const& header, std::uint64_t done) {
    Member& one = member(rank);
    if (done == 0) {
        if (!can_say(rank, header)) {
            throw ProtocolError{};
        }
        one.consumed = header.consumed;
    }
    if (header.kind != FrameKind::arrival) {
        return room_in(one.body, header.bytes, done);
    }
    if (!end_) {
        return collectives_.place(header, rank, done);
    }
    return room_in(one.body, (std::min<std::uint64_t>)(header.bytes - done, 65'536), 0);
}

JOINABLE_DEFINITION bool Hub::can_say(int rank, FrameHeader const& header) {
    Member const& one = member(rank);
    if (one.has_ended || header.consumed < one.consumed || header.consumed > one.outbox.sent()) {
        return false;
    }
    bool const is_asked_for = end_ || header.sequence == meeting ||
                              is_wait_for_rank(header.sequence, size()) ||
                              collectives_.has_arrived(header.sequence, rank);
    switch (header.kind) {
    case FrameKind::arrival:
        return end_ ? header.bytes <= most_frame_bytes
                    : !handshakes_ && collectives_.is_arrival(header, rank);
    case FrameKind::abort: return header.bytes <= most_told_bytes;
    case FrameKind::overdue:
        return header.bytes <= most_told_bytes && is_asked_for &&
               header.count <=
                   static_cast<std::uint64_t>((std::numeric_limits<std::int64_t>::max)());
    case FrameKind::question: return header.bytes == 0 && is_asked_for;
    case FrameKind::leave:
    case FrameKind::keep_alive:
    case FrameKind::credit: return header.bytes == 0;
    default: return false;
    }
}

JOINABLE_DEFINITION void Hub::take(int rank, FrameHeader const& header) {
    std::vector<std::byte> const& body = member(rank).body;
    switch (header.kind) {
    case FrameKind::arrival:
        // An arrival that began before the end does not count.
        if (!end_) {
            collectives_.arrive(header, rank);
        }
        // Complete it now: the next frame of this rank may end all.
        while (!end_ && collectives_.is_complete()) {
            finish_collective();
        }
        break;
    case FrameKind::abort:
        if (auto reason = unpacked_reason(body)) {
            end(std::move(*reason));
            break;
        }
        throw ProtocolError{};
    case FrameKind::leave: member(rank).has_ended = true; break;
    case FrameKind::keep_alive: member(rank).alive_at = Clock::now(); break;
    case FrameKind::overdue: overdue_.push_back({rank, header, unpacked_text(body)}); break;
    case FrameKind::question:
        if (!end_) { // which answers it
            answer(rank, header.sequence);
        }
        break;
    default: break;
    }
}

JOINABLE_DEFINITION void
Hub::judge(int rank, FrameHeader const& header, std::string const& meanwhile) {
    if (end_ || is_finished(header.sequence)) {
        return; // its answer is on the way
    }
    auto const deadline = std::chrono::nanoseconds{static_cast<std::int64_t>(header.count)};
    std::vector<int> overdue = missing(header.sequence);
    auto const left =
        take_ranks_at_work(overdue, deadline, [&](int other) { return member(other).alive_at; });
    if (!overdue.empty()) {
        bool const is_meeting = header.sequence == meeting;
        char const* const to_do = is_meeting ? "connect" : "arrive";
        AbortReason reason = reason_of_delay(overdue, to_do, deadline, rank, meanwhile);
        if (std::string const why = is_meeting ? handshakes_->obstacle() : ""; !why.empty()) {
            reason.message = concat(
                "rank 0 could not accept the connections of ",
                ranks_text(overdue),
                " within ",
                std::chrono::duration<double>(deadline).count(),
                " s: ",
                why
            );
        }
        end(std::move(reason));
        return;
    }
    auto const count = static_cast<std::uint64_t>(left.count());
    send(rank, {.kind = FrameKind::wait, .sequence = header.sequence, .count = count});
}

JOINABLE_DEFINITION void Hub::answer(int rank, std::uint64_t sequence) {
    std::vector<int> const ranks = is_finished(sequence) ? std::vector<int>{} : missing(sequence);
    send(rank, {.kind = FrameKind::answer, .sequence = sequence}, std::as_bytes(std::span{ranks}));
}

JOINABLE_DEFINITION std::vector<int> Hub::missing(std::uint64_t sequence) const {
    if (is_wait_for_rank(sequence, size())) {
        return {static_cast<int>(meeting - 1 - sequence)};
    }
    if (sequence != meeting) {
        return collectives_.missing(sequence);
    }
    return ranks_where(size(), [&](int rank) { return !members_[as_index(rank)].has_come; });
}

JOINABLE_DEFINITION void Hub::send(int rank, FrameHeader header, std::span<std::byte const> body) {
    Member& one = member(rank);
    if (!is_linked(rank)) {
        return;
    }
    header.bytes = body.size();
    header.consumed = one.inbox.consumed();
    one.outbox.send(one.socket, bytes_of(header), body, one.limit());
}

JOINABLE_DEFINITION void Hub::flush(Member& one) {
    if (one.socket.is_open()) {
        one.outbox.flush(one.socket, leaving_ ? Outbox::no_limit : one.limit());
    }
}

JOINABLE_DEFINITION void Hub::finish_collective() {
    if (auto const reason = collectives_.disagreement()) {
        end(*reason);
        return;
    }
    collectives_.finish([this](int rank, std::uint64_t sequence, std::span<std::byte const> body) {
        send(rank, {.kind = FrameKind::result, .sequence = sequence}, body);
    });
}

JOINABLE_DEFINITION void Hub::end(AbortReason reason) {
    if (!end_) {
        end_ = std::move(reason);
        untold_ = size();
    }
    for (; untold_ > 0; --untold_) {
        send_end(untold_ - 1);
    }
}

JOINABLE_DEFINITION void Hub::look_into_lobby() {
    if (handshakes_) {
        handshakes_->poll(
            [this](int rank) { return member(rank).has_come; },
            [this](int rank, Socket socket) { admit(rank, std::move(socket)); }
        );
    }
}

JOINABLE_DEFINITION void Hub::admit(int rank, Socket socket) {
    Member& one = member(rank);
    one.socket = std::move(socket);
    one.watch = SilenceWatch{limits_.silence};
    one.has_come = true;
    if (end_) {
        untold_ = rank + 1; // if the memory runs out meanwhile
        send_end(rank);
        untold_ = 0;
    }
}

JOINABLE_DEFINITION void Hub::start_if_all_are_here() {
    if (end_ || !handshakes_ || !missing(meeting).empty()) {
        return;
    }
    handshakes_.reset();
    for (int rank = size(); rank-- > 0;) {
        send(rank, {.kind = FrameKind::start});
    }
}

JOINABLE_DEFINITION void Hub::lose(int rank, AbortReason const& reason) {
    member(rank).socket.close();
    end(reason);
    if (rank == 0 && !leaving_) {
        begin_to_leave();
    }
}

JOINABLE_DEFINITION void Hub::begin_to_leave() {
    leaving_ = end_of_wait(limits_.patience);
    look_into_lobby(); // late ranks learn why all ended, not that no rank 0 listens
    handshakes_.reset();
}

JOINABLE_DEFINITION bool Hub::is_over() {
    bool is_over = true;
    std::uint64_t delivered = 0;
    for (Member& one : members_) {
        if (!one.socket.is_open()) {
            continue;
        }
        flush(one);
        if (one.outbox.is_empty()) {
            one.socket.end_sending();
        }
        std::size_t const left = one.socket.undelivered();
        if (one.outbox.is_empty() && left == 0) {
            one.socket.close();
            continue;
        }
        delivered += one.outbox.sent() - left;
        is_over = false;
    }
    if (std::exchange(delivered_, delivered) != delivered) { // over a slow connection
        leaving_ = end_of_wait(limits_.patience);
    }
    return is_over || Clock::now() >= *leaving_;
}

}}} // namespace joinable::v0::detail
