// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include <joinable/agreement/agreement_list.hpp>
#include <joinable/communicator/control.hpp>
#include <joinable/config.hpp>
#include <joinable/join/detail/guard_outcome.hpp>
#include <joinable/join/detail/rank_groups.hpp>
#include <joinable/join/detail/rounds.hpp>
#include <joinable/join/detail/turn_order.hpp>
#include <joinable/join/result.hpp>
#include <joinable/join/round.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The hooks of a guard behind virtual functions, so that the loop over rounds need not be a
/// template.
class HookRunner {
public:
    HookRunner() = default;
    HookRunner(HookRunner const&) = delete;
    HookRunner& operator=(HookRunner const&) = delete;
    /// Before this rank says that it has no further input: what has been cleared counts no more.
    virtual void forget_cleared() = 0;
    virtual void run_main_hook(std::size_t position, Round const& round) = 0;
    virtual void run_post_hooks(JoinResult const& result, bool is_last_joiner) = 0;

protected:
    ~HookRunner() = default;
};

/// One rank's side of a guard: the open round, whose part it is, and how the guard ends. It does
/// everything except owning hooks and restoring what the guard attached.
class Session {
public:
    Session(
        std::vector<ControlCommunicator*> communicators,
        std::vector<ParticipantInfo> participants,
        std::unique_ptr<RankGroups> groups,
        JoinOptions const& options
    );

    Session(Session const&) = delete; // rounds know the options by address
    Session& operator=(Session const&) = delete;

    /// Collective. Agrees on `list`, and exchanges the numbers of inputs if ranks know them. `window` is what
    /// this rank has accumulated. Rethrows `local_error`, if there is one.
    /// @throws PeerFailed, Mismatch  on all ranks together.
    void
    enter(AgreementList const& list, Window const& window, std::exception_ptr const& local_error);

    [[nodiscard]] bool can_abort() const noexcept { return outcome_.can_abort(); }

    /// The batches that this rank has accumulated since the last round that synced.
    [[nodiscard]] Window const& window() const noexcept { return rounds_.window(); }
    [[nodiscard]] Window const& untouched_window() const noexcept {
        return rounds_.untouched_window();
    }
    /// See Window::clear.
    /// @throws ContractViolation  ranks have been told of its weight, which would divide by what is not there.
    void clear_window(bool in_round);
    /// @throws ContractViolation  the window may be in a round that ranks know of.
    void require_between_rounds() const;

    /// For words that the open part of a participant sums over all ranks, joined ones too. They go
    /// through the control communicator, after the roll calls that were posted before. Null for a participant
    /// of a group, whose own communicator has its ranks.
    [[nodiscard]] ControlCommunicator* words(std::size_t position) const noexcept {
        return groups_ != nullptr && groups_->is_of_group(position) ? nullptr : words_.get();
    }
    /// Null: all participants have the guard's ranks.
    [[nodiscard]] RankGroups* groups() const noexcept { return groups_.get(); }

    // -- what participants call ------------------------------------------------------------------

    /// Opens a round (`answer` waits for it), or begins a part of the open one. Local, except with
    /// EndPolicy::throw_early: then it waits, so that no pass runs for a round that does not take
    /// place.
    void announce(std::size_t position, RoundNotice const& notice);

    /// Blocks until the announced round is agreed on, and returns it.
    /// @throws what ended the guard, also if it was thrown before: then there is no such round.
    Round answer(std::size_t position) {
        if (outcome_.is_over_or_has_groups(
            )) { // asked here, or compilers keep waits out of their callers
            return answer_in_group(position);
        }
        hear_verdict();
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

    /// Whether rounds continue. Joined ranks then run the collectives of participants and no others.
    /// Local.
    [[nodiscard]] bool runs_rounds() const noexcept {
        return !outcome_.is_over() && !stopped_ && !has_ended_;
    }

    [[nodiscard]] TurnOrder const& turns() const noexcept { return turns_; }
    /// Whether joined ranks step as active ones do, because a participant steps.
    [[nodiscard]] bool steps_joined_ranks() const noexcept { return turns_.steps_joined_ranks(); }

    /// Called before an object outside this guard uses one of its communicators.
    /// @throws ContractViolation  joined ranks would not follow, because no part of a participant
    ///         is open and rounds have not ended.
    void require_followed(std::string_view name);

    /// Notes the settings of a step in a round in which all ranks are active. Ranks compare them in
    /// the next roll call and when the guard closes. See UsedSettings::add().
    void note_settings(AgreementList const& list, std::uint64_t hash) {
        rounds_.settings().add(list, hash);
    }

    void record_failure(std::string_view text) { outcome_.record(text); }
    /// Calls f(). An exception that it throws will leave the guard, and peers see its text.
    template <class F>
    decltype(auto) recorded(F const& f) {
        try {
            return f();
        } catch (...) {
            outcome_.record({});
            throw;
        }
    }
    /// The text that peers see, whatever exception leaves the guard.
    void fail(std::string_view text) { outcome_.fail_with(text); }
    void forget_failure() noexcept { outcome_.forget_exception(); }

    [[nodiscard]] bool is_active(int rank) const { return rounds_.roll_call().is_active(rank); }
    /// Whether the announced round is open. A round that this rank shadows is open, even if
    /// look-ahead has already posted the next roll call.
    [[nodiscard]] bool is_answered() const noexcept {
        return !rounds_.is_posted() || is_ahead_ || is_shadowing_;
    }
    [[nodiscard]] bool announced_sync() const noexcept {
        return is_answered() ? round_.will_sync() : opened_ && opened_->syncs();
    }

    /// Whether next() or iterate() opened the round. Local.
    [[nodiscard]] bool loop_opens_rounds() const noexcept {
        return opened_ && opened_->opening != Opening::notification;
    }
    /// See detail::announced_round. Local.
    [[nodiscard]] RoundNotice const* announced_round(std::size_t position) const {
        bool const waits =
            opened_ && (loop_opens_rounds() || (is_answered() && turns_.next() == position));
        return waits ? &opened_->notice : nullptr;
    }

    // -- what the guard calls --------------------------------------------------------------------

    /// Opens a round if this rank has an input. False tells it to leave the loop.
    bool next(bool have_input, RoundNotice const& notice, Opening opening);

    /// Announces the round after the open one, before the collectives of the open one. Without a
    /// notice it announces that this rank has no further round.
    void look_ahead(std::optional<RoundNotice> const& notice);

    void vote_stop();

    /// Joins, shadows until all ranks have joined, and runs the post hooks.
    void finish(HookRunner& hooks);

    /// Leaves a guard by an exception. Never throws, and blocks at most until the deadline. Between
    /// rounds it announces the failure in the next roll call; anywhere else it aborts the
    /// communicators.
    void leave_by_exception() noexcept;

    /// Ends the guard on all ranks with the exception that is being handled. Unless that leaves the guard, the next
    /// call of a participant throws its reason again, or the end of the guard does. Never throws.
    void fail_at_once() noexcept;

    /// The result of finish(), once it has run.
    [[nodiscard]] std::optional<JoinResult> const& result() const noexcept { return result_; }
    [[nodiscard]] bool is_over() const noexcept { return outcome_.is_over(); }
    /// A participant is destroyed, so the guard cannot go on.
    void lose_participant(std::size_t position) noexcept;
    [[nodiscard]] bool has_lost_participant() const noexcept { return has_lost_participant_; }
    /// @throws the failure that ended the guard, if this rank alone knew it and has not been told.
    void require_told() {
        if (outcome_.owes_failure()) {
            outcome_.require_alive();
        }
    }
    [[nodiscard]] Round const& round() const noexcept { return round_; }

private:
    static constexpr char const* stop_needs_loop =
        "votes and EndPolicy::stop_at_first need a loop that runs on next() or iterate(), so that "
        "no rank computes a round that was stopped";

    /// The open round as the participant at `position` sees it. Throws as answer() does.
    [[gnu::cold]] Round answer_in_group(std::size_t position);

    Announcement open(RoundNotice const& notice, Opening opening, std::size_t opener);
    [[noreturn]] void refuse_late(Opening opening, std::size_t opener) const;

    void begin_part(std::size_t position, RoundNotice const& notice);

    /// Waits for the answer of a posted roll call, if there is one, and acts on it.
    void hear_verdict();

    /// Waits for the posted roll call. Returns its verdict, or throws what ends the guard with an
    /// exception.
    Verdict hear();

    /// Aborts after an exchange of all ranks has thrown, on this rank alone or because the
    /// communicator failed. The others cannot continue.
    void abort_together(AbortReason const& reason) {
        outcome_.record_end_of_roll_calls(reason);
        abort();
    }
    /// Tells every rank, wherever it waits, why this one leaves.
    void abort() noexcept;

    void check_later_notice(std::size_t position, RoundNotice const& notice) const;

    /// `caller`: the participant that notifies; none if the guard ends, or a loop opens a round.
    void require_no_announcement(std::optional<std::size_t> caller = {}) const;

    void require_complete_round() const {
        require_no_announcement();
        turns_.require_complete();
    }

    /// Aborts if this rank has announced a round ahead: the others already compute it and need this
    /// rank.
    void require_nothing_ahead();

    [[nodiscard]] bool is_between_rounds() const;

    /// Why ranks that accumulated with weights and without them cannot enter. Collective.
    [[nodiscard]] AbortReason difference_of_windows(Window const& window) const;

    // -- the end ---------------------------------------------------------------------------------

    void shadow_until_end(HookRunner& hooks);

    std::unique_ptr<RankGroups> groups_; ///< null: all participants have the guard's ranks
    GuardOutcome outcome_;
    std::unique_ptr<ControlCommunicator> words_;
    TurnOrder turns_;
    JoinOptions options_;
    Rounds rounds_;

    Round round_;
    std::optional<Announcement> opened_; ///< the last round that this rank opened
    bool is_ahead_ = false;              ///< the posted roll call is that of the next round
    std::optional<Announcement> ahead_;  ///< its notice; none when it announces the end
    bool is_shadowing_ = false;
    bool has_lost_participant_ = false;
    bool stopped_ = false;   ///< by agreement, before every rank ran out
    bool has_ended_ = false; ///< the end verdict was heard, post hooks run
    std::optional<JoinResult> result_;
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/join/detail/impl/session.ipp>
#endif
