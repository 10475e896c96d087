// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/tcp/detail/rank.hpp>

#include <algorithm>
#include <array>

#include <joinable/communicator/detail/reasons.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/detail/text.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void TcpRank::meet(std::string const& meanwhile) {
    meeting_text_ = meanwhile;
    wait_until_ready(meeting);
    throw_if_over(has_started_);
}

JOINABLE_DEFINITION std::uint64_t TcpRank::post(Request const& request, Descriptor const& shown) {
    require_here(rank_);
    Descriptor const& signature = request.signature;
    while (pending_.size() == most_in_flight) {
        finish(finished_);
    }
    throw_if_over(shown);
    FrameHeader header;
    header.kind = FrameKind::arrival;
    header.collective = signature.collective;
    header.dtype = signature.dtype;
    header.op = signature.op;
    header.root = signature.root;
    header.count = signature.count;
    header.sequence = next();
    std::uint64_t const sequence = next();
    pending_.push_back({signature, shown, request.out});
    ConstBuffer const& in = request.in;
    try {
        send(header, std::span{static_cast<std::byte const*>(in.data), in.bytes()});
    } catch (...) { // without memory nothing was sent
        pending_.pop_back();
        throw;
    }
    return sequence;
}

JOINABLE_DEFINITION bool TcpRank::progress(std::uint64_t sequence) {
    if (!is_done(sequence)) {
        poll();
        throw_if_lost(sequence);
    }
    return is_done(sequence);
}

JOINABLE_DEFINITION void TcpRank::finish(std::uint64_t sequence) {
    wait_until_ready(sequence);
    throw_if_lost(sequence);
}

JOINABLE_DEFINITION void TcpRank::abort(AbortReason const& reason) {
    if (is_aborted()) {
        return;
    }
    own_reason_ = reason;
    send({.kind = FrameKind::abort}, packed(reason));
    pump_until([] { return false; });
    if (!over_) {
        over_ = reason;
        if (!std::exchange(is_alone_, true)) {
            over_->message += concat(
                "; rank 0, where the ranks meet, did not answer this within ",
                std::chrono::duration<double>(patience_).count(),
                " s, so the others may not know"
            );
        }
    }
}

JOINABLE_DEFINITION void TcpRank::keep_alive() {
    require_here(rank_);
    outbox_.flush(socket_);
    if (outbox_.is_empty()) { // else the hub accepts nothing now; the next call will do
        send({.kind = FrameKind::keep_alive});
    }
}

JOINABLE_DEFINITION std::vector<int> TcpRank::missing_ranks() {
    poll();
    if (pending_.empty() || over_) {
        return {};
    }
    std::uint64_t const oldest = finished_;
    send({.kind = FrameKind::question, .sequence = oldest});
    ++questions_;
    missing_ = {0}; // if the hub does not answer
    has_answer_ = false;
    pump_until([this] { return has_answer_; });
    return over_ || is_done(oldest) ? std::vector<int>{} : missing_;
}

JOINABLE_DEFINITION std::chrono::nanoseconds
TcpRank::ask_about(int peer, std::string const& meanwhile) {
    overdue_ = {};
    ask_for_more(wait_for_rank(peer), meanwhile);
    pump_until([this] { return overdue_.left.has_value(); });
    if (!overdue_.left && !over_) {
        give_up(meanwhile);
    }
    throw_if_over(false);
    return *overdue_.left;
}

JOINABLE_DEFINITION TcpRank::Overdue* TcpRank::overdue_of(std::uint64_t sequence) noexcept {
    if (sequence == meeting || is_wait_for_rank(sequence, size_)) {
        return &overdue_;
    }
    bool const is_pending = sequence >= finished_ && sequence < next();
    return is_pending ? &pending_[sequence - finished_].overdue : nullptr;
}

JOINABLE_DEFINITION void TcpRank::throw_if_over(bool is_done) const {
    if (!is_done && over_) {
        throw_failure(reason());
    }
}

JOINABLE_DEFINITION void TcpRank::wait_until_ready(std::uint64_t sequence) {
    poll();
    if (Overdue* const overdue = overdue_of(sequence); overdue != nullptr && !overdue->is_asked) {
        overdue->clock = {}; // not the time of earlier tests
    }
    while (!over_ && !is_ready(sequence)) {
        pump(end_of_wait(check_clock(sequence, WaitClock::gap_of_waits)));
    }
}

JOINABLE_DEFINITION std::chrono::nanoseconds
TcpRank::check_clock(std::uint64_t sequence, std::chrono::nanoseconds longest_gap) {
    Overdue& overdue = *overdue_of(sequence);
    if (overdue.left) {
        overdue.clock.extend(deadline_, *std::exchange(overdue.left, std::nullopt));
    }
    if (overdue.is_asked &&
        std::exchange(overdue.consumed, inbox_.consumed()) != inbox_.consumed()) {
        overdue.clock = {}; // the hub is alive
    }
    std::chrono::nanoseconds const most = overdue.is_asked ? patience_ : deadline_;
    if (!overdue.clock.reaches(most, longest_gap)) {
        return overdue.clock.nap(most);
    }
    if (overdue.is_asked) {
        give_up(waiting_text(sequence));
    } else {
        ask_for_more(sequence, waiting_text(sequence));
        overdue.clock = {};
        overdue.consumed = inbox_.consumed();
    }
    return std::chrono::nanoseconds{0};
}

JOINABLE_DEFINITION void
TcpRank::ask_for_more(std::uint64_t sequence, std::string const& meanwhile) {
    std::string const text = cut_text(meanwhile, most_reason_text);
    Overdue& overdue = *overdue_of(sequence);
    overdue.deadline = (std::max)(deadline_, std::chrono::nanoseconds{0});
    auto const count = static_cast<std::uint64_t>(overdue.deadline.count());
    send(
        {.kind = FrameKind::overdue, .sequence = sequence, .count = count},
        std::as_bytes(std::span{text})
    );
    overdue.is_asked = true;
}

JOINABLE_DEFINITION void TcpRank::give_up(std::string const& meanwhile) {
    is_alone_ = true;
    abort(reason_of_delay(
        {0}, "answer for all ranks, which meet there,", deadline_ + patience_, rank_, meanwhile
    ));
}

JOINABLE_DEFINITION void TcpRank::send(FrameHeader header, std::span<std::byte const> body) {
    header.bytes = body.size();
    header.consumed = inbox_.consumed();
    outbox_.send(socket_, bytes_of(header), body);
    told_ = header.consumed;
}

JOINABLE_DEFINITION void TcpRank::pump(TimePoint end) {
    std::uint64_t const consumed = inbox_.consumed();
    poll();
    if (!over_ && consumed == inbox_.consumed()) {
        auto const events = static_cast<short>(POLLIN | (outbox_.is_empty() ? 0 : POLLOUT));
        if (hear_) {
            if (auto const reason = hear_()) {
                hear_ = nullptr; // abort() waits, too
                abort(*reason);
                return;
            }
            end = (std::min<TimePoint>)(end, Clock::now() + between_questions);
        }
        wait_for(socket_, events, (std::min)(end, watch_.next_look()));
        poll();
    }
}

JOINABLE_DEFINITION void TcpRank::poll() {
    require_here(rank_);
    if (over_) { // buffers of lost collectives belong to the caller again
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
    if ((!goes_on || watch_.is_lost(socket_, Clock::now())) && !over_) {
        over_ = own_reason_.value_or(AbortReason{
            FailureKind::peer_failed,
            {0},
            "rank 0 failed: its connection broke: its process died, or its machine is out of "
            "reach"
        });
    }
    if (!over_ && inbox_.consumed() - told_ >= 16'384) {
        send({.kind = FrameKind::credit});
    }
}

JOINABLE_DEFINITION void TcpRank::refuse(ProtocolError const& error) {
    AbortReason const reason{
        FailureKind::communication,
        {0},
        concat("rank 0 sent rank ", rank_, " ", error.what, ": is it this version of joinable?")
    };
    send({.kind = FrameKind::abort}, packed(reason));
    over_ = reason;
}

JOINABLE_DEFINITION std::span<std::byte>
TcpRank::place_for(FrameHeader const& header, std::uint64_t done) {
    if (done == 0) {
        require_expected(header);
    }
    if (header.kind == FrameKind::result && header.bytes != 0) {
        Buffer const& out = pending_.front().out;
        return std::span{static_cast<std::byte*>(out.data), out.bytes()}.subspan(done);
    }
    return room_in(body_, header.bytes, done);
}

JOINABLE_DEFINITION std::size_t TcpRank::bytes_of_result() const noexcept {
    Descriptor const& signature = pending_.front().signature;
    bool const gets_some =
        signature.collective == Collective::all_reduce ||
        (signature.collective == Collective::broadcast && signature.root != rank_);
    return gets_some ? pending_.front().out.bytes() : 0;
}

JOINABLE_DEFINITION void TcpRank::require_expected(FrameHeader const& header) {
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
            overdue != nullptr && overdue->is_asked && header.count > 0 &&
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

JOINABLE_DEFINITION void TcpRank::take(FrameHeader const& header) {
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
        overdue.is_asked = false;
        overdue.left = std::chrono::nanoseconds{static_cast<std::int64_t>(header.count)};
        break;
    }
    case FrameKind::answer: {
        std::vector<int> ranks = unpacked_ranks(body_);
        if (!are_ranks(ranks, size_)) {
            throw ProtocolError{"numbers that are no ranks"};
        }
        has_answer_ = --questions_ == 0;
        if (has_answer_) { // an older question's answer does not count
            missing_ = std::move(ranks);
        }
        break;
    }
    default: break;
    }
}

JOINABLE_DEFINITION void TcpRank::leave() noexcept {
    if (!is_here()) {
        return;
    }
    try {
        send({.kind = FrameKind::leave});
        std::array<std::byte, 4096> ignored{};
        while_hub_is_alive([&](TimePoint end) {
            outbox_.flush(socket_);
            auto got = socket_.receive(ignored);
            for (int more = 1000; got.value_or(0) != 0 && more > 0; --more) {
                got = socket_.receive(ignored);
            }
            if (got && *got == 0) {
                auto const events = static_cast<short>(POLLIN | (outbox_.is_empty() ? 0 : POLLOUT));
                wait_for(socket_, events, end);
            }
            return got.has_value();
        });
    } catch (...) { // NOLINT(bugprone-empty-catch): the hub sees the closed connection
    }
}

}}} // namespace joinable::v0::detail
