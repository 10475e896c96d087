// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/deadline.hpp>
#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/reasons.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/tcp/detail/frame.hpp>
#include <joinable/communicator/tcp/detail/socket.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// One rank's side of its connection to the hub. Whoever waits or tests moves what there is to move;
/// nothing does it in between, but what was posted is under way, as far as the kernel takes it.
class TcpRank {
public:
    TcpRank(Socket socket, int rank, int size, std::chrono::nanoseconds deadline)
        : socket_{std::move(socket)}, rank_{rank}, size_{size}, deadline_{deadline} {}
    TcpRank(TcpRank const&) = delete;
    TcpRank& operator=(TcpRank const&) = delete;
    ~TcpRank() { leave(); }

    [[nodiscard]] int rank() const noexcept { return rank_; }
    [[nodiscard]] int size() const noexcept { return size_; }
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) noexcept {
        return std::exchange(deadline_, deadline);
    }

    /// Returns when all ranks have come. `meanwhile` says what this one does until then.
    void meet(std::string const& meanwhile) {
        wait_until([this] { return has_started_; }, meeting, [&] { return meanwhile; });
        throw_if_over(has_started_);
    }

    /// Arrives in the next collective and returns its number.
    std::uint64_t post(Request const& request) {
        Descriptor const& said = request.signature;
        while (pending_.size() == most_in_flight) {
            finish(finished_);
        }
        throw_if_over(false);
        FrameHeader header;
        header.kind = FrameKind::arrival;
        header.collective = said.collective;
        header.dtype = said.dtype;
        header.op = said.op;
        header.root = said.root;
        header.count = said.count;
        header.sequence = next();
        std::uint64_t const sequence = next();
        pending_.push_back({said, request.out});
        ConstBuffer const& in = request.in;
        send(header, std::span{static_cast<std::byte const*>(in.data), in.bytes()});
        return sequence;
    }
    [[nodiscard]] bool is_done(std::uint64_t sequence) const noexcept {
        return sequence < finished_;
    }
    /// Whether finish() would return at once. @throws as it does.
    [[nodiscard]] bool test(std::uint64_t sequence) {
        if (!is_done(sequence)) {
            look();
            throw_if_over(is_done(sequence));
        }
        return is_done(sequence);
    }
    void finish(std::uint64_t sequence) {
        wait_until(
            [&] { return is_done(sequence); },
            sequence,
            [&] { return "waits in " + pending_[sequence - finished_].said.text(); }
        );
        throw_if_over(is_done(sequence));
    }

    /// What all ranks throw is the first reason that reaches the hub. Returns when the hub has said
    /// which that is: what others do because of what this rank does next cannot be before it. If it
    /// does not answer, it is this rank's own.
    void abort(AbortReason const& reason) {
        if (is_aborted()) {
            return;
        }
        own_reason_ = reason;
        FrameHeader header;
        header.kind = FrameKind::abort;
        send(header, packed(reason));
        auto const end = is_alone_ ? Clock::now() : Clock::now() + tcp_patience;
        while (!over_ && Clock::now() < end) {
            pump(end);
        }
        if (!over_) {
            is_alone_ = true;
            over_ = reason;
        }
    }
    /// Tells the others that an exception is leaving `what` on this rank.
    void abort_for_exception(std::string const& what) {
        abort(blamed_on(rank_, {FailureKind::peer_failed, {}, "an exception left " + what}));
    }
    [[nodiscard]] bool is_aborted() {
        look();
        return over_.has_value();
    }

    void keep_alive() {
        outbox_.flush(socket_);
        if (outbox_.is_empty()) { // else the hub takes nothing now, and the next time will do
            FrameHeader header;
            header.kind = FrameKind::keep_alive;
            send(header, {});
        }
    }

    /// Who has not arrived in the oldest collective that is not finished here.
    [[nodiscard]] std::vector<int> missing_ranks() {
        look();
        if (pending_.empty()) {
            return {};
        }
        if (over_) {
            return missing_;
        }
        FrameHeader header;
        header.kind = FrameKind::question;
        header.sequence = finished_;
        send(header, {});
        missing_ = {0}; // if it does not answer
        has_answer_ = false;
        auto const end = Clock::now() + tcp_patience;
        while (!has_answer_ && !over_ && Clock::now() < end) {
            pump(end);
        }
        return pending_.empty() || is_done(header.sequence) ? std::vector<int>{} : missing_;
    }

private:
    using Clock = std::chrono::steady_clock;
    static constexpr std::size_t most_in_flight = 64;

    struct Pending {
        Descriptor said;
        Buffer out;
    };

    [[nodiscard]] std::uint64_t next() const noexcept { return finished_ + pending_.size(); }
    void throw_if_over(bool is_done) const {
        if (!is_done && over_) {
            throw_failure(*over_);
        }
    }

    /// Waits until `ready()`, until all is over, or until the hub says that it is, as it does when it
    /// is asked at the deadline. `meanwhile()` tells the others what this rank does.
    template <class Ready, class Meanwhile>
    void wait_until(Ready const& ready, std::uint64_t sequence, Meanwhile const& meanwhile) {
        look();
        TimePoint end = end_of_wait(deadline_);
        bool is_asked = false;
        while (!ready() && !over_) {
            std::uint64_t const consumed = inbox_.consumed();
            pump(end);
            if (again_ && again_->sequence == sequence) {
                end = end_of_wait(again_->left);
                is_asked = false;
            } else if (is_asked && consumed != inbox_.consumed()) {
                end = Clock::now() + tcp_patience;
            }
            again_.reset();
            if (ready() || over_ || Clock::now() < end) {
                continue;
            }
            if (is_asked) {
                give_up(meanwhile());
                return;
            }
            std::string const text = meanwhile();
            FrameHeader header;
            header.kind = FrameKind::overdue;
            header.sequence = sequence;
            header.count = static_cast<std::uint64_t>(deadline_.count());
            send(header, std::as_bytes(std::span{text}));
            is_asked = true;
            end = Clock::now() + tcp_patience;
        }
    }
    /// Rank 0 is stopped, or cannot be reached: nobody else can tell this rank anything.
    void give_up(std::string const& meanwhile) {
        is_alone_ = true;
        abort(reason_of_delay(
            {0},
            "answer for all ranks, which meet there,",
            deadline_ + tcp_patience,
            rank_,
            meanwhile
        ));
    }

    // -- moving -----------------------------------------------------------------------------------

    void send(FrameHeader header, std::span<std::byte const> body) {
        header.bytes = body.size();
        header.consumed = inbox_.consumed();
        told_ = header.consumed;
        outbox_.send(socket_, bytes_of(header), body);
    }
    /// Does what can be done now, else waits until something can, or until `end`.
    void pump(TimePoint end) {
        std::uint64_t const consumed = inbox_.consumed();
        look();
        if (!over_ && consumed == inbox_.consumed()) {
            auto const events = static_cast<short>(POLLIN | (outbox_.is_empty() ? 0 : POLLOUT));
            wait_for(socket_, events, end);
            look();
        }
    }
    /// Does what can be done now.
    void look() {
        if (over_) { // buffers of collectives that are lost are the caller's again
            return;
        }
        outbox_.flush(socket_);
        bool const goes_on = inbox_.read(
            socket_,
            [this](FrameHeader const& header) { return place_for(header); },
            [this](FrameHeader const& header, std::span<std::byte const> body) {
                take(header, body);
            }
        );
        if (!goes_on && !over_) {
            over_ = own_reason_.value_or(AbortReason{
                FailureKind::peer_failed,
                {0},
                "rank 0 failed: its connection broke: its process died, or its machine is out of "
                "reach"
            });
        }
        if (!over_ && inbox_.consumed() - told_ >= 16'384) {
            FrameHeader header;
            header.kind = FrameKind::credit;
            send(header, {});
        }
    }

    [[nodiscard]] std::span<std::byte> place_for(FrameHeader const& header) {
        if (header.kind == FrameKind::result && header.bytes != 0) {
            Buffer const& out = pending_.front().out;
            return {static_cast<std::byte*>(out.data), out.bytes()};
        }
        body_.resize(header.bytes);
        return body_;
    }
    void take(FrameHeader const& header, std::span<std::byte const> body) {
        switch (header.kind) {
        case FrameKind::start: has_started_ = true; break;
        case FrameKind::result:
            pending_.pop_front();
            ++finished_;
            break;
        case FrameKind::end: over_ = unpacked_reason(body); break;
        case FrameKind::wait:
            again_ = Again{
                header.sequence, std::chrono::nanoseconds{static_cast<std::int64_t>(header.count)}
            };
            break;
        case FrameKind::answer:
            missing_ = unpacked_ranks(body);
            has_answer_ = true;
            break;
        default: break;
        }
    }

    /// Says that nothing more comes from this rank, and waits a little until the hub has all that was
    /// sent: closing a connection before can destroy it.
    void leave() noexcept {
        try {
            FrameHeader header;
            header.kind = FrameKind::leave;
            send(header, {});
            auto const end = is_alone_ ? Clock::now() : Clock::now() + tcp_patience;
            std::vector<std::byte> ignored(4096);
            bool is_open = true;
            while (is_open && Clock::now() < end) {
                outbox_.flush(socket_);
                auto const got = socket_.receive(ignored);
                is_open = got.has_value();
                if (got && *got == 0) {
                    auto const events =
                        static_cast<short>(POLLIN | (outbox_.is_empty() ? 0 : POLLOUT));
                    wait_for(socket_, events, end);
                }
            }
        } catch (...
        ) { // NOLINT(bugprone-empty-catch): the connection breaks, which the hub notices
        }
    }

    struct Again {
        std::uint64_t sequence;
        std::chrono::nanoseconds left;
    };

    Socket socket_;
    int rank_;
    int size_;
    std::chrono::nanoseconds deadline_;
    Inbox inbox_;
    Outbox outbox_;
    std::vector<std::byte> body_; ///< of a frame that is no result
    std::uint64_t told_ = 0;      ///< of what was consumed
    bool has_started_ = false;
    std::deque<Pending> pending_; ///< posted, but not finished
    std::uint64_t finished_ = 0;
    bool is_alone_ = false;                 ///< the hub answers no more
    std::optional<AbortReason> own_reason_; ///< of this rank's abort
    std::optional<AbortReason> over_;       ///< what every wait throws that did not complete before
    std::optional<Again> again_;
    bool has_answer_ = false;
    std::vector<int> missing_;
};

}}} // namespace joinable::v0::detail
