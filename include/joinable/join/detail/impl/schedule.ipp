// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/join/detail/schedule.hpp>

#include <algorithm>
#include <utility>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION
Schedule::Schedule(std::vector<Shard> shards, bool is_weighted, std::size_t sync_every)
    : shards_{std::move(shards)}, is_weighted_{is_weighted}, sync_every_{sync_every} {
    for (std::size_t rank = 0; rank < shards_.size(); ++rank) {
        by_length_.push_back(static_cast<int>(rank));
        weight_ += shards_[rank].weight;
        held_ += shards_[rank].held_weight;
    }
    std::sort(by_length_.begin(), by_length_.end(), [this](int a, int b) {
        return std::pair{inputs_of(a), a} < std::pair{inputs_of(b), b};
    });
}

JOINABLE_DEFINITION void
Schedule::require_promised(int rank, std::size_t round, RollCallLanes const& mine) const {
    std::uint64_t const inputs = inputs_of(rank);
    if (mine.active != 0 && round >= inputs) {
        throw ContractViolation{
            "rank " + to_text(rank) +
            " opened more rounds than JoinOptions::inputs = " + to_text(inputs) + " promised"
        };
    }
    if (mine.active == 0 && round < inputs) {
        throw ContractViolation{
            "rank " + to_text(rank) + " left after " + to_text(round) +
            " rounds, but JoinOptions::inputs = " + to_text(inputs) +
            " promised more; without known lengths a rank may leave when it likes"
        };
    }
    if (mine.stop != 0) {
        throw ContractViolation{
            "vote_stop() needs roll calls; leave JoinOptions::inputs empty to vote"
        };
    }
    if (mine.active == 0) {
        return;
    }
    RoundCode const announced = RoundCode::decode(static_cast<std::uint32_t>(mine.code.sum));
    RoundCode const expected = code(round);
    if (announced.phase != expected.phase || announced.syncs != expected.syncs ||
        (mine.weighted != 0) != is_weighted_ || mine.weight != weight_in(rank, round)) {
        throw ContractViolation{
            "the notice of round " + to_text(round) +
            " differs from what JoinOptions::inputs, weight_per_input and sync_every fixed at "
            "entry; give no notice, or leave JoinOptions::inputs empty"
        };
    }
}

JOINABLE_DEFINITION RollCallLanes Schedule::next() {
    arriving_.clear();
    carry_ = {};
    std::uint64_t const unsynced = round_ % sync_every_;
    bool const holds = round_ < sync_every_; // what was there before the guard
    while (joined_ < by_length_.size() && inputs_of(by_length_[joined_]) == round_) {
        Shard const& shard = this->shard(by_length_[joined_]);
        weight_ -= shard.weight;
        held_ -= shard.held_weight;
        carry_.weight +=
            (is_weighted_ ? shard.weight * unsynced : 0) + (holds ? shard.held_weight : 0);
        bool const has_carry = unsynced != 0 || (holds && shard.held_batches != 0);
        carry_.ranks += has_carry ? 1 : 0;
        carry_.weighted +=
            has_carry && is_weighted_ ? 1 : 0; // the entry has compared what ranks hold
        arriving_.push_back(by_length_[joined_++]);
    }
    RollCallLanes totals;
    auto const active = static_cast<std::uint32_t>(by_length_.size() - joined_);
    RoundCode const fixed = code(round_);
    bool const is_first_sync = ++round_ == sync_every_;
    Agreement const one = Agreement::of(fixed.encode());
    totals.active = active;
    totals.arrived = static_cast<std::uint32_t>(arriving_.size());
    totals.weighted = is_weighted_ ? active : 0;
    totals.contributors = active;
    totals.weight =
        (is_weighted_ ? weight_ * rounds_in_weight(fixed) : 0) + (is_first_sync ? held_ : 0);
    totals.code = {one.sum * active, one.squares * active};
    return totals;
}

}}} // namespace joinable::v0::detail
