// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

#include <joinable/join/detail/window.hpp>
#include <joinable/join/options.hpp>

namespace joinable { inline namespace v0 {

namespace detail {
class Session;
class Rounds;
class LocalRounds;
class GroupsOfRanks;
} // namespace detail

/// One forward pass of the active ranks, as all ranks agreed on it. Outside a guard, and in one
/// that is not enabled, all ranks count as active, and only this rank's own weight is known. Cheap
/// to copy; `is_active` is valid until the next round opens, and like hold() and done() only while the
/// guard lives.
class Round {
public:
    Round() = default;

    /// The round of a participant outside enabled guards. It takes all ranks as active and
    /// contributing, and knows this rank's weight only.
    static Round outside_guard(
        int world_size, RoundNotice const& notice, detail::Window const& window = {}
    ) noexcept {
        Round round;
        round.active_count_ = round.contributor_count_ = world_size;
        round.phase_ = notice.phase;
        round.will_sync_ = detail::syncs(notice);
        round.is_weighted_ = notice.weight.has_value() || (notice.skips && window.is_weighted);
        round.contributes_ = !notice.skips || window.is_open();
        round.weight_ = round.weight_sum_ =
            detail::own_weight(notice) + (round.will_sync_ ? window.weight : 0);
        round.accumulated_rounds_ = window.rounds;
        return round;
    }

    /// Counted from 0 inside a guard.
    [[nodiscard]] std::size_t number() const noexcept { return number_; }
    [[nodiscard]] Phase phase() const noexcept { return phase_; }
    /// Whether gradients are reduced.
    [[nodiscard]] bool will_sync() const noexcept { return will_sync_; }
    [[nodiscard]] int active_count() const noexcept { return active_count_; }
    [[nodiscard]] inline bool is_active(int rank) const;
    /// Whether notices carry weights.
    [[nodiscard]] bool is_weighted() const noexcept { return is_weighted_; }
    /// The sum of all ranks' weights. Outside a guard, this rank's own weight.
    [[nodiscard]] std::uint64_t weight_sum() const noexcept { return weight_sum_; }
    /// This rank's weight. In a round that syncs it includes the weights since the last one that
    /// did. On a shadowing rank it is 0, except in the first round that syncs after it ran out:
    /// there it is what the rank held.
    [[nodiscard]] std::uint64_t weight() const noexcept { return weight_; }
    /// Whether this rank's gradients are in the sum of this round. False if the rank skips the
    /// round and accumulated nothing since the last round that synced, or if the weights of all
    /// ranks sum to 0. On a shadowing rank it is true only in the first round that syncs after it
    /// ran out, and only if it accumulated something before (JoinOptions::carry_accumulated).
    [[nodiscard]] bool contributes() const noexcept { return contributes_; }
    /// The number of contributing ranks, the same on all ranks: the divisor of an average over
    /// them. If it is 0, the average is zeros. Outside a guard and with known lengths, ranks that
    /// skip are not known; outside a guard this is the number of ranks.
    [[nodiscard]] int contributor_count() const noexcept { return contributor_count_; }
    /// The number of training rounds that did not sync between the last round that did and this
    /// one, those before the guard included. The same on all ranks, unless they discarded different
    /// windows.
    [[nodiscard]] std::size_t accumulated_rounds() const noexcept { return accumulated_rounds_; }
    /// The lowest active rank. It broadcasts fresh state.
    [[nodiscard]] int buffer_source() const noexcept { return buffer_source_; }
    /// Whether this rank has run out of inputs and only shadows.
    [[nodiscard]] bool is_shadow() const noexcept { return is_shadow_; }
    /// When this rank was blocked until all ranks had opened this round. `begin == end` if the answer had
    /// arrived before it was needed and no rank has run out in this round, and outside a guard.
    struct Wait {
        std::chrono::steady_clock::time_point begin;
        std::chrono::steady_clock::time_point end;
    };
    [[nodiscard]] Wait waited() const noexcept { return waited_; }
    /// Whether an enabled guard opened this round.
    [[nodiscard]] bool in_guard() const noexcept { return session_ != nullptr; }

    /// Keeps this participant's part of the round open until done(). Call it right after the
    /// notification if collectives follow later. Local. Outside a guard it does nothing.
    inline void hold();
    /// Ends this participant's part. All its collectives of the round must be complete. Local. Without
    /// it the part ends where the next one begins; a throw between rounds then counts as one inside the part.
    inline void done();

private:
    friend class detail::Session;
    friend class detail::Rounds;
    friend class detail::LocalRounds;
    friend class detail::GroupsOfRanks;
    friend class PendingRound;

    detail::Session* session_ = nullptr;
    Wait waited_{};
    std::size_t position_ = 0;
    std::size_t number_ = 0;
    std::uint64_t weight_ = 0;
    std::uint64_t weight_sum_ = 0;
    std::size_t accumulated_rounds_ = 0;
    int active_count_ = 1;
    int contributor_count_ = 1;
    int buffer_source_ = 0;
    Phase phase_ = Phase::train;
    bool will_sync_ = true;
    bool is_weighted_ = false;
    bool is_shadow_ = false;
    bool contributes_ = true;
    bool is_of_group_ = false; ///< ranks are those of the participant's group
};

}} // namespace joinable::v0
