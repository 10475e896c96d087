// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <joinable/communicator/detail/deadline.hpp>
#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/reasons.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/detail/work_of.hpp>
#include <joinable/communicator/tcp/detail/frame.hpp>
#include <joinable/communicator/tcp/detail/socket.hpp>
#include <joinable/config.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Asks what else may end these ranks: the reason, if something has.
using Hear = std::function<std::optional<AbortReason>()>;

/// One rank's side of its connection to the hub. Only post(), waits and tests move frames. A posted
/// frame is sent at once as far as the kernel accepts it.
class TcpRank : public HasWorks {
public:
    /// `hear` is asked during every wait. Rank 0 is lost if its machine acknowledges nothing for
    /// `limits.silence`.
    TcpRank(
        Socket socket,
        int rank,
        int size,
        std::chrono::nanoseconds deadline,
        Hear hear = {},
        TcpLimits const& limits = {}
    )
        : socket_{std::move(socket)}, watch_{limits.silence}, patience_{limits.patience},
          rank_{rank}, size_{size}, deadline_{deadline}, hear_{std::move(hear)} {}
    TcpRank(TcpRank const&) = delete;
    TcpRank& operator=(TcpRank const&) = delete;
    ~TcpRank() { leave(); }

    [[nodiscard]] int rank() const noexcept { return rank_; }
    [[nodiscard]] int size() const noexcept { return size_; }
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) noexcept {
        return std::exchange(deadline_, deadline);
    }

    /// Returns when all ranks have arrived. `meanwhile` describes this rank's wait.
    void meet(std::string const& meanwhile);

    /// Arrives in the next collective and returns its number.
    std::uint64_t post(Request const& request) { return post(request, request.signature); }
    /// The same for a collective that stands for another one, which errors show.
    std::uint64_t post(Request const& request, Descriptor const& shown);
    [[nodiscard]] bool is_done(std::uint64_t sequence) const noexcept {
        return sequence < finished_;
    }
    /// Whether finish() would return at once. At the deadline it asks the hub, without waiting for
    /// the answer.
    /// @throws as finish() does.
    [[nodiscard]] bool
    test(std::uint64_t sequence, std::chrono::nanoseconds longest_gap = WaitClock::gap_of_tests) {
        if (progress(sequence)) {
            return true;
        }
        check_clock(sequence, longest_gap);
        throw_if_lost(sequence);
        return false;
    }
    /// test() without a deadline.
    [[nodiscard]] bool progress(std::uint64_t sequence);
    void finish(std::uint64_t sequence);

    /// All ranks throw the first reason that reaches the hub. Returns when the hub has reported
    /// which one that is, so that failures caused by this rank's next actions come later. If the
    /// hub does not answer, this rank's own reason counts, and says so.
    void abort(AbortReason const& reason);
    [[nodiscard]] bool is_aborted() {
        poll();
        return over_.has_value();
    }
    [[nodiscard]] std::optional<AbortReason> abort_reason() {
        poll();
        return over_ ? std::optional{reason()} : std::nullopt;
    }
    /// See Communicator.
    void renumber() noexcept { is_renumbered_ = true; }
    [[nodiscard]] bool is_renumbered() const noexcept { return is_renumbered_; }

    void keep_alive();
    /// A wait for `peer` beside the collectives has lasted for the deadline. Returns how much longer
    /// it may last, because that rank has said that it is at work. Waits for the hub's answer.
    /// @throws TimedOut
    [[nodiscard]] std::chrono::nanoseconds ask_about(int peer, std::string const& meanwhile);

    /// The ranks that have not arrived in the oldest collective that is unfinished here.
    [[nodiscard]] std::vector<int> missing_ranks();

private:
    using Clock = std::chrono::steady_clock;
    static constexpr std::chrono::milliseconds between_questions{10}; ///< of hear_

    /// A question to the hub at the deadline of a wait: how much longer may it last?
    struct Overdue {
        bool is_asked = false;                             ///< without an answer yet
        std::chrono::nanoseconds deadline = {};            ///< of the question
        std::optional<std::chrono::nanoseconds> left = {}; ///< its answer
        WaitClock clock = {};                              ///< since it is asked: of the answer
        std::uint64_t consumed = 0;                        ///< when last asked, or last seen alive
    };
    struct Pending {
        Descriptor signature;
        Descriptor shown;
        Buffer out;
        Overdue overdue = {};
    };

    [[nodiscard]] std::uint64_t next() const noexcept { return finished_ + pending_.size(); }
    /// Null if no wait for it is possible.
    [[nodiscard]] Overdue* overdue_of(std::uint64_t sequence) noexcept;
    /// @pre over_
    [[nodiscard]] AbortReason reason() const {
        AbortReason reason = *over_;
        reason.is_renumbered = is_renumbered_;
        return reason;
    }
    void throw_if_over(bool is_done) const;
    /// The same for a collective that is about to begin, which the error shows.
    void throw_if_over(Descriptor const& shown) const {
        if (over_) {
            throw_failure(in_words_of(rank_, shown.text(), reason()));
        }
    }
    /// The same for one that is posted.
    void throw_if_lost(std::uint64_t sequence) const {
        if (!is_done(sequence)) {
            throw_if_over(pending_[sequence - finished_].shown);
        }
    }

    /// Whether the meeting, or a collective, is over.
    [[nodiscard]] bool is_ready(std::uint64_t sequence) const noexcept {
        return sequence == meeting ? has_started_ : is_done(sequence);
    }
    /// Waits until it is ready, until the group has ended, or until the hub ends it. The hub does
    /// that when it is asked at the deadline.
    void wait_until_ready(std::uint64_t sequence);
    /// Calls `step(end)`, which may wait until then, as long as it returns true and the hub is
    /// alive: until the patience has passed since the last byte that moved: received by the hub's
    /// machine, or read by inbox_. Looks once more after that, because this process may have been
    /// stopped.
    template <class Step>
    void while_hub_is_alive(Step const& step) {
        auto const moved = [this] {
            return outbox_.sent() - socket_.undelivered() + inbox_.consumed();
        };
        std::uint64_t before = moved();
        for (auto end = end_of_wait(patience_); !is_alone_;) {
            bool const is_late = Clock::now() >= end;
            if (!step(end)) {
                return;
            }
            if (std::uint64_t const now = moved(); std::exchange(before, now) != now) {
                end = end_of_wait(patience_);
            } else if (is_late) {
                return;
            }
        }
    }
    /// Waits for the hub until `ready()` or until the group has ended.
    template <class Ready>
    void pump_until(Ready const& ready) {
        while_hub_is_alive([&](TimePoint end) {
            bool const goes_on = !over_ && !ready();
            if (goes_on) {
                pump(end);
            }
            return goes_on;
        });
    }
    /// For a wait that finds nothing: at the deadline asks the hub how much longer it may last, and gives up on a
    /// hub that does not answer within the patience. Returns for how long a wait that blocks may sleep.
    std::chrono::nanoseconds
    check_clock(std::uint64_t sequence, std::chrono::nanoseconds longest_gap);
    [[nodiscard]] std::string waiting_text(std::uint64_t sequence) const {
        return sequence == meeting ? meeting_text_
                                   : "waits in " + pending_[sequence - finished_].shown.text();
    }
    /// Tells the hub that the deadline has passed. The hub ends all ranks or answers how much
    /// longer to wait.
    /// @pre overdue_of(sequence) is not null
    void ask_for_more(std::uint64_t sequence, std::string const& meanwhile);
    /// Rank 0 is stopped or unreachable, so this rank can learn nothing more.
    void give_up(std::string const& meanwhile);

    // -- moving -----------------------------------------------------------------------------------

    void send(FrameHeader header, std::span<std::byte const> body = {});
    /// Does what is possible now. If that is nothing, waits until something is, or until `end`.
    void pump(TimePoint end);
    /// Does what is possible now.
    /// @throws ContractViolation  this process was forked since the rank attached.
    void poll();

    /// Rank 0 broke the protocol. Ends all ranks, if rank 0 still tells them.
    void refuse(ProtocolError const& error);

    [[nodiscard]] std::span<std::byte> place_for(FrameHeader const& header, std::uint64_t done);
    /// The size of this rank's result in its oldest collective.
    [[nodiscard]] std::size_t bytes_of_result() const noexcept;
    /// @throws ProtocolError  the hub may not send this frame now.
    void require_expected(FrameHeader const& header);
    /// @pre require_expected(header) was called
    void take(FrameHeader const& header);

    /// Announces that this rank sends no more, and waits briefly until the hub has received
    /// everything: closing the connection earlier could destroy data.
    void leave() noexcept;

    Socket socket_;
    SilenceWatch watch_;
    std::chrono::nanoseconds patience_; ///< with rank 0
    int rank_;
    int size_;
    bool is_renumbered_ = false;
    std::chrono::nanoseconds deadline_;
    Hear hear_;
    Inbox inbox_;
    Outbox outbox_;
    std::vector<std::byte> body_; ///< of a frame that is not a result
    std::uint64_t told_ = 0;      ///< how much of the consumed bytes was reported
    bool has_started_ = false;
    std::string meeting_text_;    ///< describes the wait for that
    std::deque<Pending> pending_; ///< posted and unfinished
    std::uint64_t finished_ = 0;
    bool is_alone_ = false;                 ///< the hub no longer answers
    std::optional<AbortReason> own_reason_; ///< this rank's own abort
    std::optional<AbortReason> over_; ///< the error of every wait that did not complete before
    Overdue overdue_;                 ///< for the meeting, and for ask_about()
    int questions_ = 0;               ///< without an answer yet
    bool has_answer_ = false;
    std::vector<int> missing_;
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/tcp/detail/impl/rank.ipp>
#endif
