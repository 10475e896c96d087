// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <joinable/join/detail/turn_order.hpp>
#include <joinable/join/detail/window.hpp>
#include <joinable/join/options.hpp>
#include <joinable/join/round.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The rounds of a guard that is not enabled. Nothing is sent, but the options and the notices of next() apply to
/// the participants as in an enabled guard, and none runs in a round in which it takes no part. A participant that
/// takes part in some rounds only, such as a step, knows the window from here; the others count their own.
class LocalRounds {
public:
    LocalRounds(JoinOptions const& options, TurnOrder const& turns)
        : options_{options}, turns_{turns} {}
    LocalRounds(LocalRounds const&) = delete; // knows both by address
    LocalRounds& operator=(LocalRounds const&) = delete;

    /// `window` is what this rank holds when the guard begins.
    void begin(Window const& window, int world_size) noexcept {
        window_ = window;
        world_size_ = world_size;
    }

    /// Opens a round by next().
    /// @throws ContractViolation  see Window::require_continued.
    void open(RoundNotice const& notice) {
        count(notice);
        loop_opens_rounds_ = true;
    }
    /// The notice of the participant at `position`. If next() opens no rounds, the first one in hook order does, and
    /// later ones follow; a notice that does not repeat the opener's is for its participant alone.
    /// @throws ContractViolation  it takes no part in the round; see Window::require_continued.
    [[nodiscard]] RoundNotice announce(std::size_t position, RoundNotice const& notice) {
        bool const is_again = opened_ && unreduced_[position];             // its pass is made anew
        bool const is_kept = is_again && turns_.first(round_) != position; // in that round
        bool const is_next =
            (position < next_position_ && !is_kept) || begins_another(position, notice);
        bool const opens = !opened_ || (!loop_opens_rounds_ && is_next);
        if (opens && is_again) {
            --rounds_; // the round, too
            --training_rounds_;
            opened_.reset(); // once, also if it is refused
        }
        RoundNotice const own = opens ? completed(notice, options_, training_rounds_)
                                : repeats(notice, *opened_) ? *opened_
                                                            : notice;
        turns_.require_part(position, round_of(world_size_, own, {}, rounds_ - (opens ? 0 : 1)));
        if (opens) {
            count(notice);
        }
        next_position_ = position + 1;
        unreduced_[position] = syncs(own);
        return own;
    }
    /// The open round of a participant that announced `notice` and holds `window`.
    [[nodiscard]] Round
    round_of(int world_size, RoundNotice const& notice, Window const& window) const noexcept {
        return round_of(world_size, notice, window, rounds_ - 1);
    }

    /// The notice of the open round, if the participant at `position` has yet to take part in it. See
    /// detail::announced_round.
    [[nodiscard]] RoundNotice const* announced_round(std::size_t position) const noexcept {
        bool const waits = opened_ && (loop_opens_rounds_ || position >= next_position_);
        return waits ? &*opened_ : nullptr;
    }

    [[nodiscard]] std::size_t count() const noexcept { return rounds_; }
    /// The round that was opened last.
    [[nodiscard]] Round const& round() const noexcept { return round_; }
    /// The batches that this rank holds. A round that syncs ends the window where gradients are reduced, and not
    /// before, because the round may be opened anew.
    [[nodiscard]] Window const& window() const noexcept { return window_; }
    /// The batches that the open round reduces, if it syncs.
    [[nodiscard]] Window const& reduced() const noexcept { return reduced_; }
    void end_window(std::size_t position) noexcept {
        window_ = {};
        unreduced_[position] = false;
    }
    /// See Window::clear. The batch of the open round is yet to come if the participant at `position` has not
    /// announced it.
    void clear_window(std::size_t position, bool in_round) noexcept {
        bool const is_counted = opened_ && position >= next_position_ && accumulates(*opened_);
        window_.clear(in_round || is_counted);
        reduced_ = {};
        if (opened_) {
            round_ = round_of(world_size_, *opened_, reduced_);
        }
    }

private:
    [[nodiscard]] static Round round_of(
        int world_size, RoundNotice const& notice, Window const& window, std::size_t number
    ) noexcept {
        Round round = Round::outside_guard(world_size, notice, window);
        round.number_ = number;
        return round;
    }
    [[nodiscard]] static bool accumulates(RoundNotice const& notice) noexcept {
        return notice.phase == Phase::train && !notice.will_sync;
    }
    /// Whether it opens the next round, because it takes no part in the open one.
    [[nodiscard]] bool begins_another(std::size_t position, RoundNotice const& notice) const {
        RoundNotice const next = completed(notice, options_, training_rounds_);
        return !turns_.takes_part(position, round_) &&
               turns_.first(round_of(world_size_, next, {}, rounds_)) == position;
    }
    void count(RoundNotice const& given) {
        RoundNotice const notice = completed(given, options_, training_rounds_);
        std::uint64_t const own = own_weight(notice);
        window_.require_continued(notice, own);
        opened_ = notice;
        next_position_ = 0;
        reduced_ = window_;
        unreduced_.assign(turns_.size(), false);
        ++rounds_;
        round_ = round_of(world_size_, notice, reduced_);
        training_rounds_ += notice.phase == Phase::train ? 1 : 0;
        if (accumulates(notice)) {
            window_.pass(false, notice, own);
        }
    }

    JoinOptions const& options_;
    TurnOrder const& turns_;
    int world_size_ = 1;
    std::optional<RoundNotice> opened_; ///< by which round_ was opened
    Round round_;
    bool loop_opens_rounds_ = false;
    std::vector<bool>
        unreduced_; ///< by position: announced in this round, with gradients to reduce
    std::size_t next_position_ = 0; ///< after the participant that announced last in this round
    std::size_t rounds_ = 0;
    std::size_t training_rounds_ = 0;
    Window window_;
    Window reduced_;
};

}}} // namespace joinable::v0::detail
