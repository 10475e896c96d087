// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/join/detail/session.hpp>

#include <cstdint>
#include <string>
#include <utility>

#include <joinable/agreement/agree.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/join/detail/skew.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION Session::Session(
    std::vector<ControlCommunicator*> communicators,
    std::vector<ParticipantInfo> participants,
    std::unique_ptr<RankGroups> groups,
    JoinOptions const& options
)
    : groups_{std::move(groups)}, outcome_{std::move(communicators), groups_.get()},
      words_{outcome_.control().twin()}, turns_{std::move(participants)}, options_{options},
      rounds_{outcome_.control(), options_} {}

JOINABLE_DEFINITION void Session::enter(
    AgreementList const& list, Window const& window, std::exception_ptr const& local_error
) {
    auto const exchange = [&] {
        try {
            constexpr unsigned with_weights = 0; // counts of 20 bits
            constexpr unsigned without_weights = 20;
            std::uint64_t open = std::uint64_t{window.is_open() ? 1U : 0U}
                                 << (window.is_weighted ? with_weights : without_weights);
            auto failure = find_disagreement(outcome_.control(), list, local_error, &open);
            if (!failure && groups_ != nullptr) {
                failure = groups_->exchange(outcome_.control(), turns_);
            }
            bool const some_have = (open & ((1U << without_weights) - 1)) != 0;
            if (!failure && some_have && open >> without_weights != 0) {
                failure = difference_of_windows(window);
            }
            rounds_.begin(window);
            if (!failure && options_.inputs && can_abort()) {
                rounds_.exchange_lengths();
            }
            return failure;
        } catch (TimedOut const& timeout) {
            throw TimedOut{
                timeout.ranks(),
                timeout.what() + std::string{"; a Join with enable = false does not enter"},
                timeout.is_renumbered()
            };
        }
    };
    throw_if_any_failed(local_error, exchange, [&](AbortReason const& reason) {
        abort_together(reason);
    });
}

JOINABLE_DEFINITION AbortReason Session::difference_of_windows(Window const& window) const {
    ControlCommunicator& control = outcome_.control();
    DifferenceReport report{control, 0, static_cast<std::uint64_t>(control.size()), true};
    std::vector<int> ranks = report.ranks_with(window.is_open() && !window.is_weighted);
    std::string text = concat(
        "guards differ: ",
        ranks_text(ranks),
        " accumulated batches without weights before this guard, others with weights; clear gradients before the "
        "guard, or call discard_window() on all ranks"
    );
    return report.reason(FailureKind::mismatch, std::move(ranks), std::move(text));
}

JOINABLE_DEFINITION void Session::clear_window(bool in_round) {
    bool const is_batch_open = !turns_.are_complete() && round_.phase() == Phase::train;
    bool const is_round_open = in_round || is_batch_open;
    bool const is_announced =
        rounds_.is_scheduled() || rounds_.is_posted() || (is_round_open && round_.will_sync());
    // A round that has ended has reduced what was announced for it.
    Window const& told = is_round_open && rounds_.announced_window().is_open()
                             ? rounds_.announced_window()
                         : is_announced ? window()
                                        : Window{};
    if (told.is_open()) {
        throw_violation(concat(
            "gradients that hold ",
            told.batches,
            " batches which no round has reduced were cleared after their weight was announced; clear gradients "
            "before the guard, or call discard_window()"
        ));
    }
    if (window().is_open()) {
        rounds_.clear_window(is_round_open);
    }
}

JOINABLE_DEFINITION void Session::require_between_rounds() const {
    if (!is_between_rounds()) {
        throw ContractViolation{
            "discard_window() was called in a round of a guard, or after a round was announced (by next(), with "
            "look-ahead or known lengths), so other ranks count the window; call it between rounds"
        };
    }
}

JOINABLE_DEFINITION void Session::announce(std::size_t position, RoundNotice const& notice) {
    outcome_.require_alive();
    if (!is_shadowing_) { // a hook may run code of active ranks
        recorded([&] { begin_part(position, notice); });
    }
}

JOINABLE_DEFINITION void Session::begin_part(std::size_t position, RoundNotice const& notice) {
    require_no_announcement(position);
    if (turns_.take_turn(position, loop_opens_rounds())) {
        outcome_.forget_exception(); // of an earlier part: it was handled
        check_later_notice(position, notice);
        return;
    }
    opened_ = open(notice, Opening::notification, position);
    if (options_.end_policy == EndPolicy::throw_early) {
        hear_verdict();
    }
}

JOINABLE_DEFINITION void Session::require_followed(std::string_view name) {
    if (!runs_rounds() || is_shadowing_ || turns_.is_open()) {
        return;
    }
    recorded([&] { // it is no participant, so nobody else would
        throw_violation(concat(
            name,
            " is used while its communicator is in a guard that does not list it, so joined ranks would not "
            "follow; add it to the guard's participants(...), or call it after finish()"
        ));
    });
}

JOINABLE_DEFINITION bool
Session::next(bool have_input, RoundNotice const& notice, Opening opening) {
    if (stopped_) {
        return false;
    }
    outcome_.require_alive();
    require_complete_round();
    if (!have_input) {
        return false;
    }
    if (is_ahead_ && (opening != Opening::look_ahead || !ahead_)) {
        throw_violation("a loop with look-ahead has already announced this rank's next round; run "
                        "one such loop in a guard, and no next() beside it");
    }
    if (is_ahead_) {
        outcome_.forget(); // as open() did before the round in which it opened this one
    }
    opened_ = is_ahead_ ? std::exchange(ahead_, {}) : open(notice, opening, 0);
    is_ahead_ = false;
    hear_verdict();
    return !stopped_;
}

JOINABLE_DEFINITION void Session::look_ahead(std::optional<RoundNotice> const& notice) {
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

JOINABLE_DEFINITION void Session::vote_stop() {
    outcome_.require_alive();
    if (!options_.enable) {
        throw_violation("vote_stop() needs roll calls; leave JoinOptions::enable true to vote");
    }
    if (opened_ && opened_->opening == Opening::notification) {
        throw_violation(
            "vote_stop() needs a loop that runs on next() or iterate(), so that no rank "
            "computes a round that was stopped"
        );
    }
    rounds_.vote_stop();
}

JOINABLE_DEFINITION void Session::finish(HookRunner& hooks) {
    outcome_.require_alive();
    try {
        require_complete_round();
        outcome_.forget(); // a failure in the last round was handled
        require_nothing_ahead();
        if (!stopped_) {
            shadow_until_end(hooks);
        }
        has_ended_ = true;
        JoinResult result = rounds_.result(stopped_);
        hooks.run_post_hooks(result, is_last_joiner(result, outcome_.control().rank()));
        rounds_.announce_closing(); // a post hook that fails on one rank fails on all
        hear();
        outcome_.end();
        result_ = std::move(result);
    } catch (...) {
        outcome_.record({});
        leave_by_exception();
        throw;
    }
}

JOINABLE_DEFINITION void Session::lose_participant(std::size_t position) noexcept {
    has_lost_participant_ = true;
    if (std::uncaught_exceptions() > 0) {
        leave_by_exception(); // which says more
    }
    if (outcome_.is_over()) {
        return;
    }
    try {
        int const rank = outcome_.control().rank();
        outcome_.fail_alone(
            {FailureKind::contract,
             {rank},
             concat(
                 turns_.name(position),
                 " on rank ",
                 rank,
                 " was destroyed before the Join that it takes part in; declare the Join after its participants"
             )}
        );
    } catch (...) {
        outcome_.end();
    }
}

JOINABLE_DEFINITION void Session::leave_by_exception() noexcept {
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
    } catch (...) { // NOLINT(bugprone-empty-catch): the roll calls have failed already
    }
    abort();
}

JOINABLE_DEFINITION void Session::fail_at_once() noexcept {
    if (!outcome_.is_over()) {
        try {
            outcome_.fail_alone(blamed_on(outcome_.control().rank(), outcome_.reason()));
        } catch (...) { // NOLINT(bugprone-empty-catch): the exception that is handled goes on
        }
    }
}

JOINABLE_DEFINITION void Session::refuse_late(Opening opening, std::size_t opener) const {
    throw_violation(concat(
        opening == Opening::notification ? turns_.call(opener) : "next() was called",
        " in a post hook, after the last round of the guard; open rounds before finish()"
    ));
}

JOINABLE_DEFINITION Announcement
Session::open(RoundNotice const& notice, Opening opening, std::size_t opener) {
    if (has_ended_) { // the others may be in the closing roll call
        refuse_late(opening, opener);
    }
    outcome_.forget(); // a failure before this round was handled
    Announcement const announcement{rounds_.completed(notice), opening, opener};
    if (opening == Opening::notification) {
        if (rounds_.has_vote() || options_.end_policy == EndPolicy::stop_at_first) {
            throw_violation(stop_needs_loop);
        }
        turns_.require_first(opener, rounds_.preview(announcement));
    }
    rounds_.announce(announcement);
    return announcement;
}

JOINABLE_DEFINITION Round Session::answer_in_group(std::size_t position) {
    if (outcome_.is_over()) {
        outcome_.require_alive();
    }
    hear_verdict();
    Round round = round_;
    round.position_ = position;
    recorded([&] { groups_->enter(round, rounds_.roll_call()); });
    return round;
}

JOINABLE_DEFINITION void Session::hear_verdict() {
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

JOINABLE_DEFINITION void Session::abort() noexcept {
    try {
        outcome_.abort(blamed_on(outcome_.control().rank(), outcome_.reason()));
    } catch (...) { // NOLINT(bugprone-empty-catch): the exception that is in flight goes on
    }
}

JOINABLE_DEFINITION Verdict Session::hear() {
    Verdict verdict{};
    try {
        verdict = rounds_.hear();
    } catch (...) {
        abort_together(reason_of(std::current_exception()));
        throw;
    }
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
    case Verdict::stop: // a rank that opens no round can always vote
        if (rounds_.was_voted_down() && rounds_.opening() == Opening::notification) {
            outcome_.fail({FailureKind::contract, {}, stop_needs_loop});
        }
        break;
    case Verdict::go_on:
    case Verdict::end: break;
    }
    return verdict;
}

JOINABLE_DEFINITION void
Session::check_later_notice(std::size_t position, RoundNotice const& notice) const {
    if (opened_ && !repeats(notice, opened_->notice)) {
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

JOINABLE_DEFINITION void Session::require_no_announcement(std::optional<std::size_t> caller) const {
    if (!is_answered()) {
        std::size_t const opener = opened_ ? opened_->opener : 0;
        bool const is_other = caller && caller != opener;
        throw_violation(concat(
            is_other ? turns_.call(*caller) + ", but " : "",
            turns_.name(opener),
            " announced round ",
            rounds_.roll_call().rounds(),
            is_other ? ", and has not waited for it" : ", but never waited for it",
            " (a forward without its backward?)"
        ));
    }
}

JOINABLE_DEFINITION void Session::require_nothing_ahead() {
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

JOINABLE_DEFINITION bool Session::is_between_rounds() const {
    return !rounds_.is_posted() && !rounds_.is_scheduled() && turns_.are_complete() && !stopped_ &&
           !has_ended_ && !is_shadowing_; // after a stop come the post hooks
}

JOINABLE_DEFINITION void Session::shadow_until_end(HookRunner& hooks) {
    turns_.close();
    hooks.forget_cleared();
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
            if (groups_ == nullptr) {
                hooks.run_main_hook(*part, round_);
            } else if (Round const own = answer_in_group(*part);
                       own.active_count_ != 0 || own.contributor_count_ != 0) {
                hooks.run_main_hook(*part, own);
            }
        }
        turns_.close();
        is_shadowing_ = false;
        warn_of_skew(options_, outcome_.control().rank(), rounds_.shadow_rounds());
        if (!rounds_.is_posted()) {
            rounds_.announce_nothing();
        }
    }
}

}}} // namespace joinable::v0::detail
