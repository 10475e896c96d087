// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/join/detail/rounds.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void Rounds::exchange_lengths() {
    std::uint64_t const weight = options_.weight_per_input.value_or(0);
    std::array<std::uint64_t, 4> const mine{
        {options_.inputs.value_or(0), weight, window_.batches, window_.weight}
    };
    std::vector<std::uint64_t> const all = control_.gather(mine);
    std::vector<Schedule::Shard> shards;
    for (std::size_t k = 0; k < all.size(); k += mine.size()) {
        shards.push_back({all[k], all[k + 1], all[k + 2], all[k + 3]});
    }
    bool const is_weighted = options_.weight_per_input.has_value();
    roll_call_.follow(Schedule{std::move(shards), is_weighted, options_.sync_every});
}

JOINABLE_DEFINITION RoundNotice Rounds::completed(RoundNotice const& notice) const {
    RoundNotice const full = detail::completed(notice, options_, training_rounds_);
    window_.require_continued(full, promised_weight(full));
    return full;
}

JOINABLE_DEFINITION Round Rounds::preview(Announcement const& announcement) const noexcept {
    Round round;
    round.number_ = roll_call_.rounds();
    round.phase_ = announcement.notice.phase;
    round.will_sync_ = announcement.syncs();
    return round;
}

JOINABLE_DEFINITION void Rounds::announce(Announcement const& announcement) {
    RoundNotice const& notice = announcement.notice;
    auto const opener = static_cast<std::uint32_t>(announcement.opener);
    RoundCode const code{notice.phase, announcement.syncs(), announcement.opening, opener};
    RollCallLanes lanes;
    lanes.active = 1;
    lanes.stop = take_vote();
    bool const tells_by_window = notice.skips && notice.phase == Phase::train && window_.is_open();
    lanes.weighted = notice.weight || (tells_by_window && window_.is_weighted) ? 1 : 0;
    lanes.silent = notice.skips && lanes.weighted == 0 && !tells_by_window ? 1 : 0;
    lanes.contributors = contributes(announcement) ? 1 : 0;
    lanes.weight = weight_of(announcement);
    lanes.code = Agreement::of(code.encode());
    lanes.digest = Agreement::of(static_cast<std::uint32_t>(roll_call_.rounds()) & digest_mask);
    roll_call_.post(lanes);
}

JOINABLE_DEFINITION void Rounds::announce_arrival() {
    RollCallLanes lanes;
    lanes.arrived = 1;
    lanes.stop = take_vote();
    bool const holds = window_.is_open();
    roll_call_.post(
        lanes, {holds ? 1U : 0U, window_.weight, holds && window_.is_weighted ? 1U : 0U}
    );
}

JOINABLE_DEFINITION Verdict Rounds::hear() {
    waited_ = {};
    if (roll_call_.test() && !roll_call_.needs_another_message()) {
        return take_carry(roll_call_.answer());
    }
    auto const begin = std::chrono::steady_clock::now();
    Verdict const verdict = roll_call_.answer();
    waited_ = {begin, std::chrono::steady_clock::now()};
    result_.waited += waited_.end - begin;
    return take_carry(verdict);
}

JOINABLE_DEFINITION Verdict Rounds::take_carry(Verdict verdict) {
    if (verdict != Verdict::go_on) {
        return verdict;
    }
    carry_ += roll_call_.carry();
    RollCallLanes const& totals = roll_call_.totals();
    bool const tells = totals.silent != totals.active;
    bool const is_carried = carry_.ranks != 0 && options_.carry_accumulated && agreed_code().syncs;
    if (!is_carried || carry_.weighted == (tells && totals.weighted == 0 ? 0 : carry_.ranks) ||
        (!tells && carry_.weighted == 0)) {
        return verdict;
    }
    std::vector<int> joined;
    for (int rank = 0; rank < control_.size(); ++rank) {
        if (!roll_call_.is_active(rank)) {
            joined.push_back(rank);
        }
    }
    std::string text = concat(
        ranks_text(joined),
        " joined with batches ",
        carry_.weighted == 0              ? "without weights"
        : carry_.weighted == carry_.ranks ? "that have weights"
                                          : "of which some have weights",
        " that no round has reduced, and round ",
        roll_call_.rounds() - 1,
        totals.weighted != 0 ? " has a weight" : " has no weight",
        "; give all batches between two rounds that sync a weight, or none"
    );
    roll_call_.refuse({FailureKind::mismatch, std::move(joined), std::move(text)});
    return Verdict::mismatch;
}

JOINABLE_DEFINITION Round Rounds::adopt(Session& session, std::optional<Announcement> const& own) {
    RollCallLanes const& totals = roll_call_.totals();
    RoundCode const code = agreed_code();
    Round round;
    round.session_ = &session;
    round.waited_ = waited_;
    round.number_ = roll_call_.rounds() - 1;
    round.phase_ = code.phase;
    round.will_sync_ = code.syncs;
    // If all active ranks are silent, joined ranks alone may hold something.
    round.is_weighted_ =
        totals.weighted != 0 || (totals.silent == totals.active && carry_.weighted != 0);
    round.active_count_ = static_cast<int>(totals.active);
    bool const takes_carry = code.syncs && options_.carry_accumulated;
    round.contributor_count_ =
        static_cast<int>(totals.contributors + (takes_carry ? carry_.ranks : 0));
    round.contributes_ = own ? contributes(*own) : takes_carry && window_.is_open();
    round.weight_sum_ = totals.weight + (takes_carry ? carry_.weight : 0);
    round.weight_ = own ? weight_of(*own) : takes_carry ? window_.weight : 0;
    if (round.will_sync_ && round.is_weighted_ && round.weight_sum_ == 0) {
        round.contributor_count_ = 0; // the average is zeros
        round.contributes_ = false;
    }
    round.accumulated_rounds_ = window_.rounds;
    round.buffer_source_ = roll_call_.lowest_active();
    round.is_shadow_ = !own;
    ++(own ? result_.own_rounds : result_.shadow_rounds);
    training_rounds_ += code.phase == Phase::train ? 1 : 0;
    if (code.syncs) {
        carry_ = {};
    }
    announced_ = own && code.syncs ? window_ : Window{};
    if (own) {
        window_.pass(code.syncs, own->notice, promised_weight(own->notice));
    } else {
        if (code.syncs && !takes_carry && window_.is_open()) {
            dropped_ = window_;
        }
        window_.pass(code.syncs, code.phase);
    }
    return round;
}

JOINABLE_DEFINITION JoinResult Rounds::result(bool stopped_early) const {
    JoinResult result = result_;
    result.rounds = roll_call_.rounds();
    result.stopped_early = stopped_early;
    result.unsynced_rounds = window_.rounds;
    std::vector<int> const& arrived = roll_call_.arrived();
    bool const some_arrived = roll_call_.totals().arrived > 0;
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

JOINABLE_DEFINITION RoundCode Rounds::agreed_code() const noexcept {
    RollCallLanes const& totals = roll_call_.totals();
    return RoundCode::decode(totals.code.value(totals.active).value_or(0));
}

}}} // namespace joinable::v0::detail
