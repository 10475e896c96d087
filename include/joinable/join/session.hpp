// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <joinable/detail/failure.hpp>
#include <joinable/join/parts.hpp>
#include <joinable/join/result.hpp>
#include <joinable/join/roll_call.hpp>
#include <joinable/join/round.hpp>

namespace joinable::inline v0::detail {

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
        : communicators_{std::move(communicators)}, parts_{std::move(participants)},
          options_{options}, roll_call_{control(), options.end_policy} {}

    /// Collective. `order` is a digest of what must be the same on all ranks; `local_error` is what
    /// this rank's constructor found, if anything: then every other rank throws PeerFailed.
    void enter(Digest order, std::exception_ptr const& local_error) {
        RollCallLanes lanes;
        lanes.active = 1;
        lanes.failed = local_error ? 1 : 0;
        EntryCode const code{
            static_cast<std::uint32_t>(parts_.count()), options_.end_policy, library_version
        };
        lanes.code = Agreement::of(code.encode());
        lanes.digest = Agreement::of(order.value());
        roll_call_.post(lanes);
        Verdict const verdict = roll_call_.agree(failure_of(local_error).message);
        if (verdict == Verdict::mismatch) {
            roll_call_.name_differences(
                "ranks enter different guards",
                "construct the same Join on every rank",
                EntryCode::text
            );
        }
        if (local_error) {
            std::rethrow_exception(local_error);
        }
        if (verdict != Verdict::go_on) {
            throw_failure(roll_call_.failure());
        }
    }

    // -- what participants call ------------------------------------------------------------------

    /// Local. Opens a round (the answer comes with `answer`), or begins a part of the open one.
    void announce(std::size_t position, RoundNotice const& notice) {
        if (is_shadowing_) {
            return; // a hook may run the code of active ranks
        }
        check_alive();
        require_no_announcement();
        if (parts_.take_turn(position, opening_ == Opening::next)) {
            check_later_notice(position, notice);
            return;
        }
        open(notice, Opening::notification, position);
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
            parts_.hold(position);
        }
    }
    void done() { parts_.done(); }

    /// Keeps the reason of a failure that is about to leave the guard; the first one counts.
    void record_failure(std::string_view text) {
        if (!recorded_) {
            recorded_ = failure_of(std::current_exception());
            if (recorded_->message.empty()) {
                recorded_->message = text;
            }
        }
    }

    [[nodiscard]] bool is_active(int rank) const { return roll_call_.is_active(rank); }
    [[nodiscard]] bool is_answered() const noexcept { return !roll_call_.is_posted(); }

    // -- what the guard calls --------------------------------------------------------------------

    /// Opens a round if this rank has an input. False when it is to leave the loop.
    bool next(bool have_input, RoundNotice const& notice) {
        if (stopped_) {
            return false;
        }
        check_alive();
        require_complete_round();
        if (!have_input) {
            return false;
        }
        open(notice, Opening::next, 0);
        settle();
        return !stopped_;
    }

    void vote_stop() {
        if (opening_ == Opening::notification) {
            throw_violation(
                "vote_stop() needs a loop that runs on next() or iterate(), so that no rank "
                "computes a round that was stopped"
            );
        }
        vote_ = true;
    }

    /// Makes this rank joined, shadows until all are, runs the post hooks. Again: the same result.
    JoinResult const& finish(HookRunner& hooks) {
        if (is_finished_) {
            return result_;
        }
        check_alive();
        try {
            require_complete_round();
            if (!stopped_) {
                shadow_until_end(hooks);
            }
            has_ended_ = true;
            make_result();
            bool const is_last = contains(result_.last_joiners, control().rank());
            hooks.run_post_hooks(result_, is_last);
            roll_call_.post({}); // a post hook that fails on one rank fails on all
            check(roll_call_.answer());
            is_finished_ = is_over_ = true;
        } catch (...) {
            record_failure({});
            leave_by_exception();
            throw;
        }
        return result_;
    }

    /// For a guard that an exception leaves. Blocks at most the deadline, never throws: between
    /// rounds it says so in the next roll call, anywhere else it aborts the communicators.
    void leave_by_exception() noexcept {
        if (is_over_) {
            return;
        }
        is_over_ = true;
        try {
            AbortReason const reason = recorded_.value_or(failure_of({}));
            if (is_between_rounds() && reason.ranks.empty()) {
                RollCallLanes lanes;
                lanes.failed = 1;
                roll_call_.post(lanes);
                roll_call_.answer(reason.message);
                return;
            }
            for (ControlCommunicator* communicator : communicators_) {
                communicator->abort(blamed_on(control().rank(), reason));
            }
        } catch (...) { // NOLINT(bugprone-empty-catch): the exception that is in flight goes on
        }
    }

    [[nodiscard]] bool is_over() const noexcept { return is_over_; }
    [[nodiscard]] Round const& round() const noexcept { return round_; }

private:
    [[nodiscard]] ControlCommunicator& control() const noexcept { return *communicators_.front(); }

    static bool contains(std::vector<int> const& ranks, int rank) {
        return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
    }

    void check_alive() const {
        if (is_over_) {
            if (failure_) {
                throw_failure(*failure_);
            }
            throw_violation("this guard has ended; construct a new Join for more rounds");
        }
    }

    // -- rounds ----------------------------------------------------------------------------------

    void open(RoundNotice const& notice, Opening opening, std::size_t opener) {
        bool const syncs = notice.will_sync && notice.phase == Phase::train;
        if (notice.weight.value_or(0) > max_weight) {
            throw_violation(
                concat("a weight of ", *notice.weight, " is above the maximum of ", max_weight)
            );
        }
        Round preview;
        preview.session_ = this;
        preview.number_ = roll_call_.rounds();
        preview.phase_ = notice.phase;
        preview.will_sync_ = syncs;
        if (opening == Opening::notification) {
            if (vote_ || options_.end_policy == EndPolicy::stop_at_first) {
                throw_violation(
                    "votes and EndPolicy::stop_at_first need a loop that runs on next() or "
                    "iterate(), so that no rank computes a round that was stopped"
                );
            }
            parts_.require_first(opener, preview);
        }
        opening_ = opening;
        notice_ = notice;
        parts_.close();
        opener_ = opener;
        RollCallLanes lanes;
        lanes.active = 1;
        lanes.stop = vote_ ? 1 : 0;
        lanes.syncs = syncs ? 1 : 0;
        lanes.weight = notice.weight.value_or(0);
        RoundCode const code{
            notice.phase,
            syncs,
            notice.weight.has_value(),
            opening,
            static_cast<std::uint32_t>(opener)
        };
        lanes.code = Agreement::of(code.encode());
        lanes.digest = Agreement::of(static_cast<std::uint32_t>(preview.number_) & digest_mask);
        roll_call_.post(lanes);
    }

    /// Waits for the answer of a posted roll call, if there is one, and acts on it.
    void settle() {
        if (!roll_call_.is_posted()) {
            return;
        }
        if (hear() == Verdict::stop) {
            stopped_ = true;
            return;
        }
        adopt_round(notice_.weight.value_or(0), false);
        ++result_.own_rounds;
        if (opening_ == Opening::notification) {
            parts_.begin(opener_);
        }
    }

    /// The answer; verdicts that end the guard with an exception are thrown here.
    Verdict hear() {
        try {
            if (roll_call_.test()) {
                return check(roll_call_.answer());
            }
            auto const begin = std::chrono::steady_clock::now();
            Verdict const verdict = roll_call_.answer();
            result_.waited += std::chrono::steady_clock::now() - begin;
            return check(verdict);
        } catch (...) {
            if (!is_over_) { // the communicator failed: the others of this guard fail with it
                record_failure({});
                leave_by_exception();
            }
            throw;
        }
    }

    Verdict check(Verdict verdict) {
        switch (verdict) {
        case Verdict::failed:
        case Verdict::mismatch:
            is_over_ = true;
            failure_ = roll_call_.failure();
            throw_failure(*failure_);
        case Verdict::early_end:
            is_over_ = true;
            throw EarlyTermination{
                roll_call_.arrived(),
                concat(
                    ranks_text(roll_call_.arrived()),
                    " ran out of inputs after ",
                    roll_call_.rounds(),
                    " rounds"
                )
            };
        case Verdict::go_on:
        case Verdict::stop:
        case Verdict::end: break;
        }
        return verdict;
    }

    void adopt_round(std::uint64_t own_weight, bool is_shadow) {
        RollCallLanes const& said = roll_call_.said();
        RoundCode const code = RoundCode::decode(*said.code.value(said.active));
        round_.session_ = this;
        round_.number_ = roll_call_.rounds() - 1;
        round_.phase_ = code.phase;
        round_.will_sync_ = code.syncs;
        round_.is_weighted_ = code.weighted;
        round_.active_count_ = static_cast<int>(said.active);
        round_.weight_sum_ = said.weight;
        round_.weight_ = own_weight;
        round_.buffer_source_ = roll_call_.lowest_active();
        round_.is_shadow_ = is_shadow;
        parts_.open(round_);
        if (code.syncs) {
            result_.unsynced_rounds = 0;
        } else if (code.phase == Phase::train) {
            ++result_.unsynced_rounds;
        }
    }

    void check_later_notice(std::size_t position, RoundNotice const& notice) const {
        if (notice != RoundNotice{} && notice != notice_) {
            throw_violation(concat(
                parts_.name(position),
                " gave a notice that differs from the one that opened round ",
                round_.number(),
                opening_ == Opening::next
                    ? "; give the notice to next() or to the announce function of iterate()"
                    : "; give the notice to the participant that comes first in hook order"
            ));
        }
    }

    void require_no_announcement() const {
        if (roll_call_.is_posted()) {
            throw_violation(concat(
                parts_.name(opener_),
                " announced round ",
                roll_call_.rounds(),
                ", but never waited for it (a forward without its backward?)"
            ));
        }
    }

    void require_complete_round() const {
        require_no_announcement();
        parts_.require_complete();
    }

    [[nodiscard]] bool is_between_rounds() const {
        return !roll_call_.is_posted() && parts_.are_complete() && !has_ended_ && !is_shadowing_;
    }

    // -- the end ---------------------------------------------------------------------------------

    void shadow_until_end(HookRunner& hooks) {
        parts_.close();
        RollCallLanes lanes;
        lanes.arrived = 1;
        lanes.stop = vote_ ? 1 : 0;
        for (;;) {
            roll_call_.post(lanes);
            lanes = {};
            Verdict const verdict = hear();
            if (verdict != Verdict::go_on) {
                stopped_ = verdict == Verdict::stop;
                return;
            }
            adopt_round(0, true);
            is_shadowing_ = true;
            for (auto part = parts_.next(); part; part = parts_.next()) {
                parts_.begin(*part);
                round_.position_ = *part;
                hooks.run_main_hook(*part, round_);
            }
            parts_.close();
            is_shadowing_ = false;
            ++result_.shadow_rounds;
        }
    }

    void make_result() {
        int const size = control().size();
        result_.rounds = roll_call_.rounds();
        result_.stopped_early = stopped_;
        bool const some_arrived = roll_call_.said().arrived > 0;
        for (int rank = 0; rank < size; ++rank) {
            result_.rounds_per_rank.push_back(roll_call_.rounds_of(rank));
            bool const was_active = (stopped_ && roll_call_.is_active(rank)) ||
                                    (some_arrived && contains(roll_call_.arrived(), rank));
            if (was_active) {
                result_.last_joiners.push_back(rank);
            }
        }
        result_.authoritative_rank = result_.last_joiners.back();
    }

    std::vector<ControlCommunicator*> communicators_; ///< distinct; the first serves roll calls
    Parts parts_;
    JoinOptions options_;
    RollCall roll_call_;

    Round round_;
    RoundNotice notice_;
    std::optional<Opening> opening_;
    std::size_t opener_ = 0;
    bool is_shadowing_ = false;
    bool vote_ = false;
    bool stopped_ = false;     ///< by agreement, before every rank ran out
    bool has_ended_ = false;   ///< the end verdict was heard, post hooks run
    bool is_finished_ = false; ///< the result is valid
    bool is_over_ = false;
    std::optional<AbortReason> recorded_; ///< why this rank leaves
    std::optional<AbortReason> failure_;  ///< what the guard itself threw
    JoinResult result_;
};

} // namespace joinable::inline v0::detail

namespace joinable::inline v0 {

inline bool Round::is_active(int rank) const {
    return session_ == nullptr || session_->is_active(rank);
}

inline void Round::hold() {
    if (session_ != nullptr) {
        session_->hold(position_);
    }
}

inline void Round::done() {
    if (session_ != nullptr) {
        session_->done();
    }
}

} // namespace joinable::inline v0
