// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

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
        bool const is_next = position < next_position_ || begins_another(position, notice);
        bool const opens = !opened_ || (!loop_opens_rounds_ && is_next);
        if (opens && opened_ && opener_ == position && !is_reduced_ && syncs(*opened_)) {
            --rounds_; // it opens this round anew
            --training_rounds_;
        }
        RoundNotice const own = opens ? completed(notice, options_, training_rounds_)
                                : repeats(notice, *opened_) ? *opened_
                                                            : notice;
        turns_.require_part(position, round_of(world_size_, own, {}, rounds_ - (opens ? 0 : 1)));
        if (opens) {
            count(notice);
            opener_ = position;
        }
        next_position_ = position + 1;
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
    void end_window() noexcept {
        window_ = {};
        is_reduced_ = true;
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
        is_reduced_ = false;
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
    std::size_t opener_ = 0;        ///< the participant that opened it
    bool is_reduced_ = false;       ///< its gradients, if it syncs
    std::size_t next_position_ = 0; ///< after the participant that announced last in this round
    std::size_t rounds_ = 0;
    std::size_t training_rounds_ = 0;
    Window window_;
    Window reduced_;
};

}}} // namespace joinable::v0::detail
