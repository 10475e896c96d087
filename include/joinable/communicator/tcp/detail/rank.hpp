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

/// One rank's side of its connection to the hub. `wait()` and `test()` move frames; nothing
/// does it in between. What was posted is under way as far as the kernel takes it.
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
    /// Whether finish() would return at once. Asks the hub at the deadline, but does not wait for it.
    /// @throws as finish() does.
    [[nodiscard]] bool test(std::uint64_t sequence) {
        bool const is_over = progress(sequence);
        if (!is_over) {
            count_poll(sequence);
        }
        return is_over;
    }
    /// The same without a deadline.
    [[nodiscard]] bool progress(std::uint64_t sequence) {
        if (!is_done(sequence)) {
            look();
            throw_if_over(is_done(sequence));
        }
        return is_done(sequence);
    }
    void finish(std::uint64_t sequence) {
        wait_until(
            [&] { return is_done(sequence); }, sequence, [&] { return waiting_text(sequence); }
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
        ++questions_;
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

    /// What the hub was asked at the deadline of one wait: for how much longer it may last.
    struct Overdue {
        int asked = 0;                                     ///< how often it has not answered yet
        std::chrono::nanoseconds deadline = {};            ///< the longest of these
        std::optional<std::chrono::nanoseconds> left = {}; ///< its answer
        // Of a work that is tested:
        PolledTime polled = {};
        std::uint64_t consumed = 0; ///< when the hub was asked last, or has been seen to live
    };
    struct Pending {
        Descriptor said;
        Buffer out;
        Overdue overdue = {};
    };

    [[nodiscard]] std::uint64_t next() const noexcept { return finished_ + pending_.size(); }
    /// Null: nobody can wait for that.
    [[nodiscard]] Overdue* overdue_of(std::uint64_t sequence) noexcept {
        if (sequence == meeting) {
            return &overdue_;
        }
        bool const is_pending = sequence >= finished_ && sequence < next();
        return is_pending ? &pending_[sequence - finished_].overdue : nullptr;
    }
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
            Overdue* const overdue = overdue_of(sequence);
            if (overdue != nullptr && overdue->left) {
                end = end_of_wait(*std::exchange(overdue->left, std::nullopt));
                is_asked = false;
            } else if (is_asked && consumed != inbox_.consumed()) {
                end = Clock::now() + tcp_patience;
            }
            if (ready() || over_ || Clock::now() < end) {
                continue;
            }
            if (is_asked) {
                give_up(meanwhile());
                return;
            }
            ask_for_more(sequence, meanwhile());
            is_asked = true;
            end = Clock::now() + tcp_patience;
        }
    }
    /// A test that has found nothing: the same as wait_until(), one step at a time.
    void count_poll(std::uint64_t sequence) {
        Overdue& overdue = *overdue_of(sequence);
        if (overdue.left) {
            overdue.polled.set(deadline_ - *std::exchange(overdue.left, std::nullopt));
        }
        if (overdue.asked == 0) {
            if (overdue.polled.reaches(deadline_)) {
                ask_for_more(sequence, waiting_text(sequence));
                overdue.polled.set(std::chrono::nanoseconds{0});
                overdue.consumed = inbox_.consumed();
            }
            return;
        }
        if (overdue.consumed != inbox_.consumed()) {
            overdue.consumed = inbox_.consumed();
            overdue.polled.set(std::chrono::nanoseconds{0});
        }
        if (overdue.polled.reaches(tcp_patience)) {
            give_up(waiting_text(sequence));
            throw_if_over(false);
        }
    }
    [[nodiscard]] std::string waiting_text(std::uint64_t sequence) const {
        return "waits in " + pending_[sequence - finished_].said.text();
    }
    /// Tells the hub that the deadline has passed: it ends all, or says for how much longer to wait.
    /// @pre overdue_of(sequence) is not null
    void ask_for_more(std::uint64_t sequence, std::string const& meanwhile) {
        std::string const text = sendable(meanwhile);
        Overdue& overdue = *overdue_of(sequence);
        std::chrono::nanoseconds const deadline =
            (std::max)(deadline_, std::chrono::nanoseconds{0});
        overdue.deadline = overdue.asked == 0 ? deadline : (std::max)(overdue.deadline, deadline);
        FrameHeader header;
        header.kind = FrameKind::overdue;
        header.sequence = sequence;
        header.count = static_cast<std::uint64_t>(deadline.count());
        send(header, std::as_bytes(std::span{text}));
        ++overdue.asked;
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
        bool goes_on = true;
        try {
            goes_on = inbox_.read(
                socket_,
                [this](FrameHeader const& header, std::uint64_t done) {
                    return place_for(header, done);
                },
                [this](FrameHeader const& header) { take(header); }
            );
        } catch (ProtocolError const& error) {
            refuse(error);
        }
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

    /// Nothing that rank 0 sends is right any more. All ranks hear it, if rank 0 still tells them.
    void refuse(ProtocolError const& error) {
        AbortReason const reason{
            FailureKind::communication,
            {0},
            concat("rank 0 sent rank ", rank_, " ", error.what, ": is it this version of joinable?")
        };
        FrameHeader header;
        header.kind = FrameKind::abort;
        send(header, packed(reason));
        over_ = reason;
    }

    [[nodiscard]] std::span<std::byte> place_for(FrameHeader const& header, std::uint64_t done) {
        if (done == 0) {
            require_expected(header);
        }
        if (header.kind == FrameKind::result && header.bytes != 0) {
            Buffer const& out = pending_.front().out;
            return std::span{static_cast<std::byte*>(out.data), out.bytes()}.subspan(done);
        }
        return room_in(body_, header.bytes, done);
    }
    /// What this rank gets of its oldest collective.
    [[nodiscard]] std::size_t bytes_of_result() const noexcept {
        auto const& [said, out, overdue] = pending_.front();
        bool const gets_some = said.collective == Collective::all_reduce ||
                               (said.collective == Collective::broadcast && said.root != rank_);
        return gets_some ? out.bytes() : 0;
    }
    /// @throws ProtocolError  the hub does not say that now.
    void require_expected(FrameHeader const& header) {
        auto const require = [](bool is_expected, auto const&... what) {
            if (!is_expected) {
                throw ProtocolError{concat(what...)};
            }
        };
        auto const require_bytes = [&](std::size_t least, std::size_t most) {
            require(
                header.bytes >= least && header.bytes <= most,
                header.bytes,
                " bytes where ",
                most,
                least == most ? " were expected" : " are the most"
            );
        };
        require(header.consumed <= outbox_.sent(), "word of bytes that it never got");
        Overdue const* const overdue = overdue_of(header.sequence);
        switch (header.kind) {
        case FrameKind::start:
            require(!has_started_, "a second start");
            require_bytes(0, 0);
            break;
        case FrameKind::result:
            require(
                has_started_ && !pending_.empty() && header.sequence == finished_,
                "a result for which it did not ask"
            );
            require_bytes(bytes_of_result(), bytes_of_result());
            break;
        case FrameKind::end: require_bytes(0, most_told_bytes); break;
        case FrameKind::wait:
            require(
                overdue != nullptr && overdue->asked > 0 && header.count > 0 &&
                    header.count <= static_cast<std::uint64_t>(overdue->deadline.count()),
                "more time, for which it did not ask"
            );
            require_bytes(0, 0);
            break;
        case FrameKind::answer:
            require(questions_ > 0, "an answer to no question");
            require_bytes(0, static_cast<std::size_t>(size_) * sizeof(std::int32_t));
            break;
        default: require(false, "a message of the unknown kind ", static_cast<int>(header.kind));
        }
    }
    /// @pre require_expected(header) was called
    void take(FrameHeader const& header) {
        switch (header.kind) {
        case FrameKind::start: has_started_ = true; break;
        case FrameKind::result:
            pending_.pop_front();
            ++finished_;
            break;
        case FrameKind::end:
            over_ = unpacked_reason(body_);
            if (!over_) {
                throw ProtocolError{"an end without a reason"};
            }
            break;
        case FrameKind::wait: {
            Overdue& overdue = *overdue_of(header.sequence);
            --overdue.asked;
            overdue.left = std::chrono::nanoseconds{static_cast<std::int64_t>(header.count)};
            break;
        }
        case FrameKind::answer: {
            std::vector<int> ranks = unpacked_ranks(body_);
            if (!are_ranks(ranks, size_)) {
                throw ProtocolError{"numbers that are no ranks"};
            }
            has_answer_ = --questions_ == 0; // or it is that to an older one
            missing_ = has_answer_ ? std::move(ranks) : missing_;
            break;
        }
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
    Overdue overdue_;                       ///< of the meeting
    int questions_ = 0;                     ///< that the hub has not answered yet
    bool has_answer_ = false;
    std::vector<int> missing_;
};

}}} // namespace joinable::v0::detail
