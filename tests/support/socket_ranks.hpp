// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <poll.h>
#include <sys/socket.h>

#include <support/named_ranks.hpp>
#include <support/ranks.hpp>

#include <joinable/algorithms.hpp>
#include <joinable/communicator/detail/deadline.hpp>
#include <joinable/communicator/detail/reasons.hpp>
#include <joinable/communicator/detail/socket.hpp>
#include <joinable/communicator/detail/work_of.hpp>

/// @file
/// The smallest transport: messages over sockets between each two ranks, without threads. MessageCommunicator
/// makes collectives of them. tests/README.md lists what it lacks.

namespace joinable_tests {

namespace inner = joinable::detail;

/// One rank. Data moves while it posts, tests or waits.
class SocketCommunicator : public inner::HasWorks {
    using Clock = std::chrono::steady_clock;

public:
    struct Message {
        bool is_send = false;
        int peer = 0;
        int tag = 0;
        joinable::Buffer buffer = {};
        bool is_received = false;
        std::uint64_t end = 0; ///< of a send, in all that goes to the peer
        inner::WaitClock clock = {};
        bool is_extended = false;

        [[nodiscard]] std::string text() const {
            return inner::text_of_message(is_send, tag, buffer.count, buffer.dtype);
        }
    };
    using Handle = std::shared_ptr<Message>;
    using Work = inner::WorkOf<SocketCommunicator, Handle>;

    /// `ends[r]` leads to rank r; there is none to this rank.
    SocketCommunicator(int rank, std::vector<inner::Socket> ends)
        : rank_{rank}, peers_(ends.size()) {
        for (std::size_t peer = 0; peer < ends.size(); ++peer) {
            peers_[peer].socket = std::move(ends[peer]);
        }
    }
    SocketCommunicator(SocketCommunicator const&) = delete;
    SocketCommunicator& operator=(SocketCommunicator const&) = delete;
    /// Leaves: what was sent still arrives.
    ~SocketCommunicator() {
        if (unwinding_.has_begun()) {
            abort_for_exception(*this, "the scope of its communicator");
        }
        tell_all(Kind::leave);
        auto const has_sent = [&] {
            pump();
            return std::all_of(peers_.begin(), peers_.end(), [](Peer const& one) {
                return !one.socket.is_open() || one.flushed == one.posted;
            });
        };
        inner::wait_at_most(deadline_, has_sent, [&] { nap(); });
    }

    [[nodiscard]] int rank() const noexcept { return rank_; }
    [[nodiscard]] int size() const noexcept { return static_cast<int>(peers_.size()); }
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) noexcept {
        return std::exchange(deadline_, deadline);
    }
    void keep_alive() { tell_all(Kind::alive); }

    Work send(joinable::ConstBuffer buffer, int to, int tag = 0) {
        Message const one{
            true, to, tag, {const_cast<void*>(buffer.data), buffer.count, buffer.dtype}
        };
        return {*this, post("destination", one)};
    }
    Work receive(joinable::Buffer buffer, int from, int tag = 0) {
        return {*this, post("source", {false, from, tag, buffer})};
    }

    // -- for works --------------------------------------------------------------------------------

    [[nodiscard]] bool is_done(Handle const& one) const noexcept {
        return one->is_send ? peer(one->peer).flushed >= one->end : one->is_received;
    }
    void finish(Handle& one) {
        inner::wait_until(
            deadline_,
            [&] { return progress(one); },
            [&] { nap(&peer(one->peer)); },
            [&] { return more_time(*one); }
        );
    }
    [[nodiscard]] bool test(Handle& one) {
        if (progress(one)) {
            return true;
        }
        one->clock.extend_when_reached(deadline_, inner::WaitClock::gap_of_tests, [&] {
            return more_time(*one);
        });
        return false;
    }
    [[nodiscard]] bool progress(Handle& one) {
        if (!is_done(one)) {
            pump();
        }
        if (is_done(one)) {
            return true;
        }
        throw_if_over(one->text());
        if (peer(one->peer).has_left) {
            fail(inner::reason_of_leaving(one->peer), *one);
        }
        return false;
    }
    [[nodiscard]] static char const* kind_of(Handle const&) noexcept { return "a message"; }
    /// The buffer belongs to the caller again.
    void release(Handle const& one) { std::erase(peer(one->peer).receives, one); }

    void abort(joinable::AbortReason const& reason) {
        pump();
        if (!reason_) {
            reason_ = reason;
            tell_all(Kind::abort, inner::packed(reason));
        }
    }
    [[nodiscard]] bool is_aborted() const { return abort_reason().has_value(); }
    [[nodiscard]] std::optional<joinable::AbortReason> abort_reason() const {
        const_cast<SocketCommunicator*>(this)->pump(); // asking reads incoming frames
        return reason_;
    }

private:
    enum class Kind : std::uint32_t { message, alive, waits, abort, leave };
    struct Header {
        Kind kind = Kind::message;
        std::int32_t tag = 0;
        joinable::DType dtype = joinable::DType::u8;
        std::uint64_t count = 0; ///< elements, or for how long the rank has been silent
        std::uint64_t bytes = 0;
    };
    struct Arrived {
        Header header;
        std::vector<std::byte> body;
    };
    struct Peer {
        inner::Socket socket;
        std::deque<std::vector<std::byte>> out = {}; ///< frames
        std::size_t out_at = 0;                      ///< of the first of them
        std::uint64_t posted = 0;                    ///< bytes
        std::uint64_t flushed = 0;
        Arrived in = {}; ///< is coming
        std::size_t in_at = 0;
        std::deque<Arrived> arrived = {};
        std::deque<Handle> receives = {};
        bool has_left = false;
        Clock::time_point alive_at{};
        Clock::time_point waits_at{};
    };

    [[nodiscard]] Peer& peer(int rank) noexcept { return peers_[static_cast<std::size_t>(rank)]; }
    [[nodiscard]] Peer const& peer(int rank) const noexcept {
        return peers_[static_cast<std::size_t>(rank)];
    }
    void throw_if_over(std::string const& what) const {
        if (reason_) {
            joinable::detail::throw_failure(inner::in_words_of(rank_, what, *reason_));
        }
    }
    void fail(joinable::AbortReason const& reason, Message const& one) {
        abort(reason);
        throw_if_over(one.text());
    }
    /// At the deadline. A rank that itself waits gets half of it more, so that it can name the one that it waits for.
    [[nodiscard]] std::optional<std::chrono::nanoseconds> more_time(Message& one) {
        std::vector<int> overdue{one.peer};
        auto const left = inner::take_ranks_at_work(overdue, deadline_, [&](int rank) {
            return peer(rank).alive_at;
        });
        if (overdue.empty()) {
            return left;
        }
        if (!one.is_extended && Clock::now() - peer(one.peer).waits_at < deadline_ / 2) {
            one.is_extended = true;
            return deadline_ / 2;
        }
        std::string const what = "waits in " + one.text();
        fail(
            inner::reason_of_delay(
                overdue, one.is_send ? "receive" : "send", deadline_, rank_, what
            ),
            one
        );
        return std::nullopt;
    }

    [[nodiscard]] Handle post(char const* role, Message const& asked) {
        inner::check_memory(asked.buffer);
        inner::check_rank(role, asked.peer, size());
        pump();
        throw_if_over(asked.text());
        auto message = std::make_shared<Message>(asked);
        Peer& other = peer(message->peer);
        if (message->is_send) {
            put(other,
                {Kind::message, asked.tag, asked.buffer.dtype, asked.buffer.count},
                {static_cast<std::byte const*>(asked.buffer.data), asked.buffer.bytes()});
            message->end = other.posted;
        } else {
            other.receives.push_back(message);
            match(other);
        }
        return message;
    }
    // -- moving -----------------------------------------------------------------------------------

    void tell_all(
        Kind kind, std::vector<std::byte> const& body = {}, std::chrono::nanoseconds age = {}
    ) {
        for (Peer& one : peers_) {
            if (one.socket.is_open()) {
                put(one, {kind, 0, {}, static_cast<std::uint64_t>(age.count())}, body);
            }
        }
    }
    void put(Peer& to, Header header, std::span<std::byte const> body) {
        header.bytes = body.size();
        auto const head = std::as_bytes(std::span{&header, 1});
        if (&to == &peer(rank_)) {
            to.arrived.push_back({header, {body.begin(), body.end()}});
            match(to);
            return;
        }
        std::vector<std::byte>& frame = to.out.emplace_back(head.begin(), head.end());
        frame.insert(frame.end(), body.begin(), body.end());
        to.posted += frame.size();
        flush(to);
    }
    static void flush(Peer& to) {
        while (to.socket.is_open() && !to.out.empty()) {
            auto const rest = std::span<std::byte const>{to.out.front()}.subspan(to.out_at);
            std::size_t const sent = to.socket.send(rest).value_or(0); // reading tells of a loss
            to.flushed += sent;
            to.out_at += sent;
            if (sent != rest.size()) {
                return;
            }
            to.out.pop_front();
            to.out_at = 0;
        }
    }
    void pump() {
        for (int from = 0; from < size(); ++from) {
            Peer& one = peer(from);
            flush(one);
            while (one.socket.is_open() && read(from, one)) {
            }
        }
    }
    /// Whether there may be more.
    [[nodiscard]] bool read(int from, Peer& one) {
        std::span<std::byte> head = std::as_writable_bytes(std::span{&one.in.header, 1});
        bool const is_head = one.in_at < head.size();
        std::span<std::byte> const into =
            is_head ? head.subspan(one.in_at)
                    : std::span{one.in.body}.subspan(one.in_at - head.size());
        if (!into.empty()) {
            auto const got = one.socket.receive(into);
            if (!got) {
                one.socket.close();
                if (!one.has_left && !reason_) {
                    one.has_left = true;
                    abort(
                        {joinable::FailureKind::peer_failed,
                         {from},
                         inner::concat("rank ", from, " failed: its connection broke")}
                    );
                }
                return false;
            }
            if (*got == 0) {
                return false;
            }
            one.in_at += *got;
        }
        if (is_head && one.in_at == head.size()) {
            one.in.body.resize(one.in.header.bytes);
        }
        if (one.in_at == head.size() + one.in.header.bytes && one.in_at >= head.size()) {
            one.in_at = 0;
            take(one, std::exchange(one.in, {}));
        }
        return true;
    }
    void take(Peer& from, Arrived frame) {
        switch (frame.header.kind) {
        case Kind::message:
            from.arrived.push_back(std::move(frame));
            match(from);
            break;
        case Kind::alive: {
            std::chrono::nanoseconds const age{static_cast<std::int64_t>(frame.header.count)};
            from.alive_at = (std::max)(from.alive_at, Clock::now() - age);
            break;
        }
        case Kind::waits: from.waits_at = Clock::now(); break;
        case Kind::leave: from.has_left = true; break;
        case Kind::abort:
            if (!reason_) {
                reason_ = inner::unpacked_reason(frame.body);
                tell_all(Kind::abort, frame.body); // before the others hear that this rank leaves
            }
            break;
        }
    }
    /// Delivers what has arrived to the receives of the same tags, in the order of posts.
    void match(Peer& from) {
        std::erase_if(from.receives, [&](Handle const& one) {
            auto const found =
                std::find_if(from.arrived.begin(), from.arrived.end(), [&](Arrived const& arrived) {
                    return arrived.header.tag == one->tag;
                });
            if (found == from.arrived.end() || reason_) {
                return false;
            }
            Header const& theirs = found->header;
            if (theirs.count != one->buffer.count || theirs.dtype != one->buffer.dtype) {
                differing_ = inner::reason_of_messages(
                    rank_,
                    one->peer,
                    one->text(),
                    inner::text_of_message(true, theirs.tag, theirs.count, theirs.dtype)
                );
            } else {
                if (!found->body.empty()) {
                    std::memcpy(one->buffer.data, found->body.data(), found->body.size());
                }
                one->is_received = true;
            }
            from.arrived.erase(found);
            return true;
        });
        if (auto const reason = std::exchange(differing_, std::nullopt)) {
            abort(*reason);
        }
    }
    /// Sleeps until data can move, for 1 ms at most. Tells the others that this rank waits, and when the one that it
    /// waits for was alive.
    void nap(Peer const* awaited = nullptr) {
        auto const now = Clock::now();
        if (now - told_at_ >= deadline_ / 8) {
            told_at_ = now;
            tell_all(Kind::waits);
            if (awaited != nullptr && awaited->alive_at != Clock::time_point{}) {
                tell_all(Kind::alive, {}, now - awaited->alive_at);
            }
        }
        std::vector<pollfd> all;
        for (Peer const& one : peers_) {
            if (one.socket.is_open()) {
                auto const events = static_cast<short>(POLLIN | (one.out.empty() ? 0 : POLLOUT));
                all.push_back({one.socket.handle(), events, 0});
            }
        }
        ::poll(all.data(), static_cast<nfds_t>(all.size()), 1);
    }

    int rank_;
    std::vector<Peer> peers_;
    std::chrono::nanoseconds deadline_ = std::chrono::seconds{60};
    Clock::time_point told_at_ = Clock::now();
    std::optional<joinable::AbortReason> reason_;
    std::optional<joinable::AbortReason> differing_;
    inner::Unwinding unwinding_;
};

/// Runs `body(comm)` over groups of these sizes, one after another; ranks are threads.
inline void run_socket_ranks(
    std::initializer_list<int> sizes, std::function<void(SocketCommunicator&)> const& body
) {
    for (int const size : sizes) {
        auto const ranks = static_cast<std::size_t>(size);
        std::vector<std::vector<inner::Socket>> ends(ranks);
        for (auto& of_rank : ends) {
            of_rank.resize(ranks);
        }
        for (std::size_t a = 0; a < ranks; ++a) {
            for (std::size_t b = 0; b < a; ++b) {
                int handles[2];
                constexpr int type = SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC;
                if (::socketpair(AF_UNIX, type, 0, handles) != 0) {
                    throw std::runtime_error{"no socketpair"};
                }
                ends[a][b] = inner::Socket{handles[0]};
                ends[b][a] = inner::Socket{handles[1]};
            }
        }
        run_in_threads(size, [&](int rank) {
            SocketCommunicator comm{rank, std::move(ends[static_cast<std::size_t>(rank)])};
            body(comm);
        });
    }
}

} // namespace joinable_tests
