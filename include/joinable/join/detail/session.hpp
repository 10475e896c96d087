// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <joinable/agreement/agree.hpp>
#include <joinable/agreement/agreement_list.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/join/detail/guard_outcome.hpp>
#include <joinable/join/detail/rounds.hpp>
#include <joinable/join/detail/skew.hpp>
#include <joinable/join/detail/turn_order.hpp>
#include <joinable/join/result.hpp>
#include <joinable/join/round.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The hooks of a guard, so that the loop over rounds need not be a template.
class HookRunner {
public:
    HookRunner() = default;
    HookRunner(HookRunner const&) = delete;
    HookRunner& operator=(HookRunner const&) = delete;
    virtual void run_main_hook(std::size_t position, Round const& round) = 0;
    virtual void run_post_hooks(JoinResult const& result, bool is_last_joiner) = 0;

protected:
    ~HookRunner() = default;
};

/// One rank's side of a guard: which round is open, whose part it is, and how it ends. Everything
/// that a guard does apart from owning hooks and restoring what it attached.
class Session {
public:
    Session(
        std::vector<ControlCommunicator*> communicators,
        std::vector<ParticipantInfo> participants,
        JoinOptions const& options
    )
        : outcome_{std::move(communicators)}, turns_{std::move(participants)}, options_{options},
          rounds_{outcome_.control(), options_} {}

    Session(Session const&) = delete; // rounds know the options by address
    Session& operator=(Session const&) = delete;

    /// Collective: agrees on `list`, and on how many inputs ranks have if they know. @throws PeerFailed,
    /// Mismatch  on all ranks together, but `local_error` where there is one.
    void enter(AgreementList const& list, std::exception_ptr const& local_error) {
        std::optional<AbortReason> failure;
        try {
            failure = find_disagreement(outcome_.control(), list, local_error);
            if (!failure && options_.inputs && can_abort()) {
                rounds_.exchange_lengths();
            }
        } catch (TimedOut const& timeout) {
            fail_together();
            std::string const text = timeout.what();
            throw TimedOut{timeout.ranks(), text + "; a Join with enable = false does not enter"};
        } catch (...) {
            fail_together();
            throw;
        }
        if (local_error) {
            std::rethrow_exception(local_error);
        }
        if (failure) {
            throw_failure(*failure);
        }
    }

    [[nodiscard]] bool can_abort() const noexcept { return outcome_.can_abort(); }

    // -- what participants call ------------------------------------------------------------------

    /// Opens a round (the answer comes with `answer`), or begins a part of the open one. Local, but
    /// where a round may end the guard instead it waits: no pass of a round that is not held may run.
    void announce(std::size_t position, RoundNotice const& notice) {
        outcome_.require_alive();
        if (is_shadowing_) {
            return; // a hook may run the code of active ranks
        }
        require_no_announcement();
        bool const loop_opens_rounds = opened_ && opened_->opening != Opening::notification;
        if (turns_.take_turn(position, loop_opens_rounds)) {
            check_later_notice(position, notice);
            return;
        }
        opened_ = open(notice, Opening::notification, position);
        if (options_.end_policy == EndPolicy::throw_early) {
            settle();
        }
    }

    /// Blocks until the round that was announced is agreed on, and returns it.
    Round answer(std::size_t position) {
        settle();
        Round round = round_;
        round.position_ = position;
        return round;
    }

    void hold(std::size_t position) {
        if (!is_shadowing_) {
            turns_.hold(position);
        }
    }
    void done() { turns_.done(); }

    /// Something that this guard does not list is about to be used over one of its communicators.
    /// @throws ContractViolation  joined ranks would not follow: no part of a participant is open, in
    /// which they run its hook, and rounds have not ended.
    void require_followed(std::string_view name) {
        if (outcome_.is_over() || stopped_ || has_ended_ || is_shadowing_ || turns_.is_open()) {
            return;
        }
        std::string const text = concat(
            name,
            " is used while its communicator is in a guard that does not list it, so joined ranks would not "
            "follow; add it to the guard's participants(...), or call it after finish()"
        );
        outcome_.record(text); // it is no participant, so nobody else would
        throw_violation(text);
    }

    void record_failure(std::string_view text) { outcome_.record(text); }
    void forget_failure() noexcept { outcome_.forget(); }

    [[nodiscard]] bool is_active(int rank) const { return rounds_.roll_call().is_active(rank); }
    /// Whether the announced round is open. A round that this rank shadows is, though with
    /// look-ahead the next roll call is posted already.
    [[nodiscard]] bool is_answered() const noexcept {
        return !rounds_.is_posted() || is_ahead_ || is_shadowing_;
    }
    [[nodiscard]] bool announced_sync() const noexcept {
        return is_answered() ? round_.will_sync() : opened_ && opened_->syncs();
    }

    /// Whether next() or iterate() announced a batch, and not that it is skipped. Local.
    [[nodiscard]] bool has_announced_batch() const noexcept {
        return opened_ && opened_->opening != Opening::notification && !opened_->notice.skips;
    }

    // -- what the guard calls --------------------------------------------------------------------

    /// Opens a round if this rank has an input. False when it is to leave the loop.
    bool next(bool have_input, RoundNotice const& notice, Opening opening) {
        if (stopped_) {
            return false;
        }
        outcome_.require_alive();
        require_complete_round();
        if (!have_input) {
            return false;
        }
        if (is_ahead_ && (opening != Opening::look_ahead || !ahead_)) {
            throw_violation("a loop with look-ahead has said already what this rank does next; run "
                            "one such loop in a guard, and no next() beside it");
        }
        opened_ = is_ahead_ ? std::exchange(ahead_, {}) : open(notice, opening, 0);
        is_ahead_ = false;
        settle();
        return !stopped_;
    }

    /// Announces the round after the open one, or without a notice that there is none for this
    /// rank, before the collectives of the open round.
    void look_ahead(std::optional<RoundNotice> const& notice) {
        if (rounds_.is_scheduled()) {
            return; // everybody knows
        }
        if (notice) {
            ahead_ = open(*notice, Opening::look_ahead, 0);
        } else {
            rounds_.announce_arrival();
        }
        is_ahead_ = true;
    }

    void vote_stop() {
        if (opened_ && opened_->opening == Opening::notification) {
            throw_violation(
                "vote_stop() needs a loop that runs on next() or iterate(), so that no rank "
                "computes a round that was stopped"
            );
        }
        rounds_.vote_stop();
    }

    /// Makes this rank joined, shadows until all are, runs the post hooks.
    void finish(HookRunner& hooks) {
        outcome_.require_alive();
        try {
            require_complete_round();
            require_nothing_ahead();
            if (!stopped_) {
                shadow_until_end(hooks);
            }
            has_ended_ = true;
            JoinResult result = rounds_.result(stopped_);
            auto const& last = result.last_joiners;
            bool const is_last =
                std::find(last.begin(), last.end(), outcome_.control().rank()) != last.end();
            hooks.run_post_hooks(result, is_last);
            rounds_.announce_nothing(); // a post hook that fails on one rank fails on all
            hear();
            outcome_.end();
            result_ = std::move(result);
        } catch (...) {
            outcome_.record({});
            leave_by_exception();
            throw;
        }
    }

    /// For a guard that an exception leaves. Blocks at most the deadline, never throws: between
    /// rounds it says so in the next roll call, anywhere else it aborts the communicators.
    void leave_by_exception() noexcept {
        if (outcome_.is_over()) {
            return;
        }
        try {
            AbortReason const reason = outcome_.reason();
            if (is_between_rounds() && reason.ranks.empty()) {
                outcome_.end();
                rounds_.announce_failure(reason.message);
                return;
            }
        } catch (...) { // NOLINT(bugprone-empty-catch): the exception that is in flight goes on
            return;
        }
        abort();
    }

    /// What finish() returned, once it has.
    [[nodiscard]] std::optional<JoinResult> const& result() const noexcept { return result_; }
    [[nodiscard]] bool is_over() const noexcept { return outcome_.is_over(); }
    [[nodiscard]] Round const& round() const noexcept { return round_; }

private:
    static constexpr char const* stop_needs_loop =
        "votes and EndPolicy::stop_at_first need a loop that runs on next() or iterate(), so that "
        "no rank computes a round that was stopped";

    Announcement open(RoundNotice const& notice, Opening opening, std::size_t opener) {
        Announcement const said{rounds_.completed(notice), opening, opener};
        if (opening == Opening::notification) {
            if (rounds_.has_vote() || options_.end_policy == EndPolicy::stop_at_first) {
                throw_violation(stop_needs_loop);
            }
            turns_.require_first(opener, rounds_.preview(said));
        }
        rounds_.announce(said);
        return said;
    }

    /// Waits for the answer of a posted roll call, if there is one, and acts on it.
    void settle() {
        if (is_answered()) {
            return;
        }
        if (hear() == Verdict::stop) {
            stopped_ = true;
            return;
        }
        round_ = rounds_.adopt(*this, opened_);
        turns_.open(round_);
        if (opened_ && opened_->opening == Opening::notification) {
            turns_.begin(opened_->opener);
        }
    }

    /// The answer; verdicts that end the guard with an exception are thrown here.
    Verdict hear() {
        Verdict verdict{};
        try {
            verdict = rounds_.hear();
        } catch (...) {
            fail_together();
            throw;
        }
        return act_on(verdict);
    }

    /// After an exchange that all ranks take part in has thrown, on this rank alone or because the
    /// communicator failed: the others cannot go on.
    void fail_together() {
        outcome_.record_end_of_roll_calls();
        abort();
    }

    /// Tells every rank, wherever it waits, why this one leaves.
    void abort() noexcept {
        try {
            outcome_.abort(blamed_on(outcome_.control().rank(), outcome_.reason()));
        } catch (...) { // NOLINT(bugprone-empty-catch): the exception that is in flight goes on
        }
    }

    Verdict act_on(Verdict verdict) {
        switch (verdict) {
        case Verdict::failed:
        case Verdict::mismatch: outcome_.fail(rounds_.roll_call().failure());
        case Verdict::early_end:
            outcome_.end();
            throw EarlyTermination{
                rounds_.roll_call().arrived(),
                to_text(ranks_text(rounds_.roll_call().arrived())) + " ran out of inputs after " +
                    to_text(rounds_.roll_call().rounds()) + " rounds"
            };
        case Verdict::stop: // a rank that opens no round can vote whatever the others do
            if (rounds_.was_voted_down() && rounds_.opening() == Opening::notification) {
                outcome_.fail({FailureKind::contract, {}, stop_needs_loop});
            }
            break;
        case Verdict::go_on:
        case Verdict::end: break;
        }
        return verdict;
    }

    void check_later_notice(std::size_t position, RoundNotice const& notice) const {
        if (!opened_ || notice == RoundNotice{} || notice == opened_->notice) {
            return;
        }
        if (notice != RoundNotice{.skips = opened_->notice.skips}) {
            throw_violation(concat(
                turns_.name(position),
                " gave a notice that differs from the one that opened round ",
                round_.number(),
                opened_->opening == Opening::notification
                    ? "; give the notice to the participant that comes first in hook order"
                    : "; give the notice to next() or to the announce function of iterate()"
            ));
        }
    }

    void require_no_announcement() const {
        if (!is_answered()) {
            throw_violation(concat(
                turns_.name(opened_ ? opened_->opener : 0),
                " announced round ",
                rounds_.roll_call().rounds(),
                ", but never waited for it (a forward without its backward?)"
            ));
        }
    }

    void require_complete_round() const {
        require_no_announcement();
        turns_.require_complete();
    }

    /// Others compute a round already that this rank has announced: they cannot go on without it.
    void require_nothing_ahead() {
        if (ahead_) {
            AbortReason const reason{
                FailureKind::contract,
                {outcome_.control().rank()},
                "rank " + to_text(outcome_.control().rank()) +
                    " left a loop with look-ahead before its end, but had announced round " +
                    to_text(rounds_.roll_call().rounds()) +
                    "; vote_stop() instead, or iterate without look_ahead"
            };
            outcome_.abort(reason);
            throw_failure(reason);
        }
    }

    [[nodiscard]] bool is_between_rounds() const {
        return !rounds_.is_posted() && !rounds_.is_scheduled() && turns_.are_complete() &&
               !stopped_ && !has_ended_ && !is_shadowing_; // after a stop come the post hooks
    }

    // -- the end ---------------------------------------------------------------------------------

    void shadow_until_end(HookRunner& hooks) {
        turns_.close();
        if (!std::exchange(is_ahead_, false)) {
            rounds_.announce_arrival();
        }
        for (;;) {
            Verdict const verdict = hear();
            if (verdict != Verdict::go_on) {
                stopped_ = verdict == Verdict::stop;
                return;
            }
            is_shadowing_ = true;
            round_ = rounds_.adopt(*this, {});
            if (rounds_.opening() == Opening::look_ahead) {
                rounds_.announce_nothing(); // before this round's collectives, as active ranks do
            }
            turns_.open(round_);
            for (auto part = turns_.next(); part; part = turns_.next()) {
                turns_.begin(*part);
                round_.position_ = *part;
                hooks.run_main_hook(*part, round_);
            }
            turns_.close();
            is_shadowing_ = false;
            warn_of_skew(options_, outcome_.control().rank(), rounds_.shadow_rounds());
            if (!rounds_.is_posted()) {
                rounds_.announce_nothing();
            }
        }
    }

    GuardOutcome outcome_;
    TurnOrder turns_;
    JoinOptions options_;
    Rounds rounds_;

    Round round_;
    std::optional<Announcement> opened_; ///< the last round that this rank opened
    bool is_ahead_ = false;              ///< the posted roll call is of the next round already
    std::optional<Announcement> ahead_;  ///< what it says; none when it says the end
    bool is_shadowing_ = false;
    bool stopped_ = false;   ///< by agreement, before every rank ran out
    bool has_ended_ = false; ///< the end verdict was heard, post hooks run
    std::optional<JoinResult> result_;
};

}}} // namespace joinable::v0::detail
