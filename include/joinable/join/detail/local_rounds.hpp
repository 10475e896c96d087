// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include <joinable/join/detail/window.hpp>
#include <joinable/join/options.hpp>
#include <joinable/join/round.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The rounds of a guard that is not enabled. Nothing is sent, but the options and the notices of next() apply to
/// the participants as in an enabled guard, and all of them count one window.
class LocalRounds {
public:
    explicit LocalRounds(JoinOptions const& options) : options_{options} {}
    LocalRounds(LocalRounds const&) = delete; // knows the options by address
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
    /// The round of the participant at `position`. If next() opens no rounds, the first one in hook order does,
    /// and later ones follow; a notice that does not repeat the opener's is for its participant alone.
    /// @throws ContractViolation  see Window::require_continued.
    [[nodiscard]] Round announce(std::size_t position, RoundNotice const& notice) {
        if (!opened_ || (!loop_opens_rounds_ && position < next_position_)) {
            count(notice);
        }
        next_position_ = position + 1;
        return repeats(notice, *opened_) ? round_ : made_by(notice);
    }

    /// The notice of a batch that next(), or an earlier participant of the open round, announced to the
    /// participant at `position`. Null if it is skipped, or there is none.
    [[nodiscard]] RoundNotice const* announced_batch(std::size_t position) const noexcept {
        bool const waits =
            opened_ && !opened_->skips && (loop_opens_rounds_ || position >= next_position_);
        return waits ? &*opened_ : nullptr;
    }

    [[nodiscard]] std::size_t count() const noexcept { return rounds_; }
    /// The round that was opened last.
    [[nodiscard]] Round const& round() const noexcept { return round_; }
    /// What this rank holds. A round that syncs ends it where gradients are reduced: it may be opened anew before.
    [[nodiscard]] Window const& window() const noexcept { return window_; }
    void end_window() noexcept { window_ = {}; }
    /// See Window::clear.
    void clear_window(bool in_round) noexcept {
        window_.clear(in_round);
        reduced_ = {};
        if (opened_) {
            round_ = made_by(*opened_);
        }
    }

private:
    [[nodiscard]] Round made_by(RoundNotice const& said) const noexcept {
        Round round = Round::outside_guard(world_size_, said, reduced_);
        round.number_ = rounds_ - 1;
        return round;
    }
    void count(RoundNotice const& given) {
        RoundNotice const said = completed(given, options_, training_rounds_);
        std::uint64_t const own = said.skips ? 0 : said.weight.value_or(0);
        window_.require_continued(said, own);
        opened_ = said;
        next_position_ = 0;
        reduced_ = window_;
        ++rounds_;
        round_ = made_by(said);
        training_rounds_ += said.phase == Phase::train ? 1 : 0;
        if (!said.will_sync || said.phase != Phase::train) {
            window_.pass(false, said, own);
        }
    }

    JoinOptions const& options_;
    int world_size_ = 1;
    std::optional<RoundNotice> opened_; ///< by which round_ was opened
    Round round_;
    bool loop_opens_rounds_ = false;
    std::size_t next_position_ = 0; ///< after the participant that announced last in this round
    std::size_t rounds_ = 0;
    std::size_t training_rounds_ = 0;
    Window window_;
    Window reduced_; ///< what the last round reduces, if it syncs
};

}}} // namespace joinable::v0::detail
