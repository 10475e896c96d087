// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include <joinable/communicator/control.hpp>
#include <joinable/config.hpp>
#include <joinable/join/detail/roll_call.hpp>
#include <joinable/join/detail/window.hpp>
#include <joinable/join/options.hpp>
#include <joinable/join/result.hpp>
#include <joinable/join/round.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// An active rank's announcement of a round.
struct Announcement {
    RoundNotice notice;
    Opening opening = Opening::notification;
    std::size_t opener = 0; ///< the participant that notifies

    [[nodiscard]] bool syncs() const noexcept { return detail::syncs(notice); }
};

/// The rounds of a guard on one rank. Announcing a round posts its roll call, hear() waits for the verdict,
/// and adopt() makes the Round that all ranks agreed on. It knows neither the turns inside a round nor how a
/// guard ends.
class Rounds {
public:
    Rounds(ControlCommunicator& control, JoinOptions const& options)
        : control_{control}, options_{options}, roll_call_{control, options.end_policy} {}

    /// Collective. Ranks exchange their numbers of inputs and need no roll calls from now on.
    void exchange_lengths();

    // -- announcing ------------------------------------------------------------------------------

    /// Takes the batches that this rank holds when the guard begins.
    void begin(Window const& window) noexcept { window_ = window; }
    [[nodiscard]] Window const& window() const noexcept { return window_; }
    /// The batches that a joined rank holds if joined ranks leave their gradients untouched.
    [[nodiscard]] Window const& untouched_window() const noexcept {
        return dropped_.is_open() ? dropped_ : window_;
    }
    /// The window that this rank announced for the round that was adopted last, if that reduces it.
    [[nodiscard]] Window const& announced_window() const noexcept { return announced_; }
    /// See Window::clear. The weight of the window has not been announced.
    void clear_window(bool in_round) noexcept { window_.clear(in_round); }

    /// The notice of the next round, with the options' weight and sync period where it has none.
    /// @throws ContractViolation  see Window::require_continued.
    [[nodiscard]] RoundNotice completed(RoundNotice const& notice) const;

    /// The next round as this rank announces it, before the others have answered.
    [[nodiscard]] Round preview(Announcement const& announcement) const noexcept;

    /// Posts the roll call of a round that this rank opens.
    void announce(Announcement const& announcement);
    /// Announces that this rank has run out of inputs, and what it holds.
    void announce_arrival();
    /// Announces at most a vote, for a rank that has joined. A vote may follow the announced arrival
    /// with look-ahead or from a hook.
    void announce_nothing() {
        RollCallLanes lanes;
        lanes.stop = take_vote();
        roll_call_.post(lanes);
    }

    /// Announces the end of a guard whose post hooks have run.
    void announce_closing() { roll_call_.post_closing(); }
    /// The settings by which this rank steps.
    [[nodiscard]] UsedSettings& settings() noexcept { return roll_call_.settings(); }

    /// Tells the others that this rank leaves by an exception.
    void announce_failure(std::string const& text) {
        RollCallLanes lanes;
        lanes.failed = 1;
        roll_call_.post(lanes);
        roll_call_.answer(text);
    }

    void vote_stop() noexcept { vote_ = true; }
    [[nodiscard]] bool has_vote() const noexcept { return vote_; }

    // -- hearing ---------------------------------------------------------------------------------

    [[nodiscard]] bool is_posted() const noexcept { return roll_call_.is_posted(); }
    [[nodiscard]] bool is_scheduled() const noexcept { return roll_call_.is_scheduled(); }
    [[nodiscard]] RollCall const& roll_call() const noexcept { return roll_call_; }

    /// Waits for the roll call that was posted, and returns its verdict.
    Verdict hear();

    /// After the verdict to go on: the round as all ranks agreed on it. `own` is this rank's
    /// announcement, or empty if it shadows the round.
    [[nodiscard]] Round adopt(Session& session, std::optional<Announcement> const& own);
    /// How the active ranks opened the last round. Not known with known lengths.
    [[nodiscard]] Opening opening() const noexcept { return agreed_code().opening; }
    [[nodiscard]] bool was_voted_down() const noexcept { return roll_call_.totals().stop > 0; }

    /// The result up to now.
    [[nodiscard]] JoinResult result(bool stopped_early) const;
    [[nodiscard]] std::size_t shadow_rounds() const noexcept { return result_.shadow_rounds; }

private:
    /// Counts what the ranks that have arrived hold. A round that reduces it has weights if it has: else
    /// the verdict is a mismatch, on all ranks.
    [[nodiscard]] Verdict take_carry(Verdict verdict);

    [[nodiscard]] RoundCode agreed_code() const noexcept;
    [[nodiscard]] bool contributes(Announcement const& announcement) const noexcept {
        return !announcement.notice.skips || window_.is_open();
    }
    /// With known lengths a rank that skips keeps the promised weight.
    [[nodiscard]] std::uint64_t promised_weight(RoundNotice const& notice) const noexcept {
        return is_scheduled() ? notice.weight.value_or(0) : own_weight(notice);
    }
    /// A round that syncs includes the weight held since the last one that did.
    [[nodiscard]] std::uint64_t weight_of(Announcement const& announcement) const noexcept {
        return promised_weight(announcement.notice) + (announcement.syncs() ? window_.weight : 0);
    }
    [[nodiscard]] std::uint32_t take_vote() noexcept {
        return vote_ && !std::exchange(is_vote_sent_, true) ? 1 : 0;
    }

    ControlCommunicator& control_;
    JoinOptions const& options_;
    RollCall roll_call_;
    Window window_;    ///< of this rank; if it has joined, before it joined
    Window dropped_;   ///< what it held when it joined, if that was dropped
    Window announced_; ///< what the last round reduces of it
    std::size_t training_rounds_ = 0;
    Carry carry_; ///< of all ranks that joined since the last round that synced
    bool vote_ = false;
    bool is_vote_sent_ = false;
    Round::Wait waited_{}; ///< in the last hear()
    JoinResult result_;    ///< counts rounds as they pass
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/join/detail/impl/rounds.ipp>
#endif
