// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <joinable/agreement/control.hpp>
#include <joinable/join/detail/accumulated.hpp>
#include <joinable/join/detail/roll_call.hpp>
#include <joinable/join/options.hpp>
#include <joinable/join/result.hpp>
#include <joinable/join/round.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// What an active rank says of a round when it opens it.
struct Announcement {
    RoundNotice notice;
    Opening opening = Opening::notification;
    std::size_t opener = 0; ///< the notifying participant

    [[nodiscard]] bool syncs() const noexcept {
        return notice.will_sync && notice.phase == Phase::train;
    }
};

/// The rounds of a guard as one rank announces, hears and counts them. Knows nothing of whose part
/// it is inside a round, nor of how a guard ends.
class Rounds {
public:
    Rounds(ControlCommunicator& control, JoinOptions const& options)
        : control_{control}, options_{options}, roll_call_{control, options.end_policy} {}

    /// Collective. Ranks say how many inputs they have, and need no roll calls from now on.
    void exchange_lengths() {
        std::uint64_t const weight = options_.weight_per_input.value_or(0);
        std::array<std::uint64_t, 2> const mine{{options_.inputs.value_or(0), weight}};
        std::vector<std::uint64_t> const all = control_.gather(mine);
        std::vector<Schedule::Shard> shards;
        for (std::size_t k = 0; k < all.size(); k += mine.size()) {
            shards.push_back({all[k], all[k + 1]});
        }
        bool const is_weighted = options_.weight_per_input.has_value();
        roll_call_.follow(Schedule{std::move(shards), is_weighted, options_.sync_every});
    }

    // -- saying ----------------------------------------------------------------------------------

    /// What a notice comes to in the next round.
    /// @throws ContractViolation  the weight, with what is held, is too large to be summed.
    [[nodiscard]] RoundNotice completed(RoundNotice const& notice) const {
        RoundNotice const said = detail::completed(notice, options_, roll_call_.rounds());
        accumulated_.require_summable(said.phase, own_weight(said));
        return said;
    }

    /// The next round as this rank alone knows it.
    [[nodiscard]] Round preview(Announcement const& said) const noexcept {
        Round round;
        round.number_ = roll_call_.rounds();
        round.phase_ = said.notice.phase;
        round.will_sync_ = said.syncs();
        return round;
    }

    void announce(Announcement const& said) {
        RoundCode const code{
            said.notice.phase, said.syncs(), said.opening, static_cast<std::uint32_t>(said.opener)
        };
        RollCallLanes lanes;
        lanes.active = 1;
        lanes.stop = take_vote();
        lanes.weighted = said.notice.weight ? 1 : 0;
        lanes.silent = said.notice.skips && !said.notice.weight ? 1 : 0;
        lanes.contributors = contributes(said) ? 1 : 0;
        lanes.weight = weight_of(said);
        lanes.code = Agreement::of(code.encode());
        lanes.digest = Agreement::of(static_cast<std::uint32_t>(roll_call_.rounds()) & digest_mask);
        roll_call_.post(lanes);
    }
    /// That this rank has run out of inputs, and what it holds.
    void announce_arrival() {
        RollCallLanes lanes;
        lanes.arrived = 1;
        lanes.stop = take_vote();
        roll_call_.post(lanes, {accumulated_.batches != 0 ? 1U : 0U, accumulated_.weight});
    }
    /// Nothing but a vote: for a rank that has joined, and for the closing of a guard. A vote may
    /// come after the arrival was announced: with look-ahead, or from a hook.
    void announce_nothing() {
        RollCallLanes lanes;
        lanes.stop = take_vote();
        roll_call_.post(lanes);
    }

    /// For a rank that leaves: says so to the others, who all hear of it.
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

    Verdict hear() {
        if (roll_call_.test()) {
            return roll_call_.answer();
        }
        auto const begin = std::chrono::steady_clock::now();
        Verdict const verdict = roll_call_.answer();
        result_.waited += std::chrono::steady_clock::now() - begin;
        return verdict;
    }

    /// After the verdict to go on: the round as all ranks agreed on it, for a rank that announced
    /// it or, without `own`, for one that shadows it.
    [[nodiscard]] Round adopt(Session& session, std::optional<Announcement> const& own) {
        RollCallLanes const& said = roll_call_.said();
        RoundCode const code = agreed_code();
        Round round;
        round.session_ = &session;
        round.number_ = roll_call_.rounds() - 1;
        round.phase_ = code.phase;
        round.will_sync_ = code.syncs;
        if (code.phase == Phase::train && said.silent != said.active) {
            was_weighted_ = said.weighted != 0;
        }
        // Where all skip nobody says; what joined ranks still hold is of rounds that said.
        round.is_weighted_ = said.weighted != 0 || (said.silent == said.active && was_weighted_);
        round.active_count_ = static_cast<int>(said.active);
        bool const takes_carry = code.syncs && options_.carry_accumulated;
        carry_.ranks += roll_call_.carry().ranks;
        carry_.weight += roll_call_.carry().weight;
        round.contributor_count_ =
            static_cast<int>(said.contributors + (takes_carry ? carry_.ranks : 0));
        round.contributes_ = own ? contributes(*own) : takes_carry && accumulated_.batches != 0;
        round.weight_sum_ = said.weight + (takes_carry ? carry_.weight : 0);
        round.weight_ = own ? weight_of(*own) : takes_carry ? accumulated_.weight : 0;
        if (round.will_sync_ && round.is_weighted_ && round.weight_sum_ == 0) {
            round.contributor_count_ = 0; // the average is zeros
            round.contributes_ = false;
        }
        round.accumulated_rounds_ = accumulated_.rounds;
        round.buffer_source_ = roll_call_.lowest_active();
        round.is_shadow_ = !own;
        ++(own ? result_.own_rounds : result_.shadow_rounds);
        if (code.syncs) {
            carry_ = {};
        }
        if (own) {
            accumulated_.pass(code.syncs, code.phase, own->notice.skips, own_weight(own->notice));
        } else {
            accumulated_.pass(code.syncs, code.phase);
        }
        return round;
    }
    /// How the active ranks opened the round that was heard last; not known with known lengths.
    [[nodiscard]] Opening opening() const noexcept { return agreed_code().opening; }
    [[nodiscard]] bool was_voted_down() const noexcept { return roll_call_.said().stop > 0; }

    /// What happened up to now.
    [[nodiscard]] JoinResult result(bool stopped_early) const {
        JoinResult result = result_;
        result.rounds = roll_call_.rounds();
        result.stopped_early = stopped_early;
        result.unsynced_rounds = accumulated_.rounds;
        std::vector<int> const& arrived = roll_call_.arrived();
        bool const some_arrived = roll_call_.said().arrived > 0;
        for (int rank = 0; rank < control_.size(); ++rank) {
            result.rounds_per_rank.push_back(roll_call_.rounds_of(rank));
            bool const arrives_last =
                some_arrived && std::find(arrived.begin(), arrived.end(), rank) != arrived.end();
            if (arrives_last || (stopped_early && roll_call_.is_active(rank))) {
                result.last_joiners.push_back(rank);
            }
        }
        result.authoritative_rank = result.last_joiners.back();
        return result;
    }
    [[nodiscard]] std::size_t shadow_rounds() const noexcept { return result_.shadow_rounds; }

private:
    [[nodiscard]] RoundCode agreed_code() const noexcept {
        RollCallLanes const& said = roll_call_.said();
        return RoundCode::decode(said.code.value(said.active).value_or(0));
    }
    [[nodiscard]] bool contributes(Announcement const& said) const noexcept {
        return !said.notice.skips || accumulated_.batches != 0;
    }
    /// 0 where it skips, unless the others know no better than what was promised at entry.
    [[nodiscard]] std::uint64_t own_weight(RoundNotice const& notice) const noexcept {
        return notice.skips && !is_scheduled() ? 0 : notice.weight.value_or(0);
    }
    /// In a round that syncs, since the last one that did.
    [[nodiscard]] std::uint64_t weight_of(Announcement const& said) const noexcept {
        return own_weight(said.notice) + (said.syncs() ? accumulated_.weight : 0);
    }
    [[nodiscard]] std::uint32_t take_vote() noexcept {
        return vote_ && !std::exchange(is_vote_sent_, true) ? 1 : 0;
    }

    ControlCommunicator& control_;
    JoinOptions const& options_;
    RollCall roll_call_;
    Accumulated accumulated_;   ///< by this rank; by one that has joined: from before
    Carry carry_;               ///< of all ranks that joined since the last round that synced
    bool was_weighted_ = false; ///< the last training round of which a rank said whether it is
    bool vote_ = false;
    bool is_vote_sent_ = false;
    JoinResult result_; ///< what is counted as rounds go by
};

}}} // namespace joinable::v0::detail
