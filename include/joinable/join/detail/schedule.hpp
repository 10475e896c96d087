// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/join/detail/verdict.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The rounds of a guard whose ranks said at entry how many inputs they have. What a roll call
/// would hear follows from that, so nothing needs to be sent. Every rank has the same schedule.
class Schedule {
public:
    /// What one rank said of itself.
    struct Shard {
        std::uint64_t inputs = 0;
        std::uint64_t weight = 0; ///< of each input
    };

    Schedule(std::vector<Shard> shards, bool is_weighted, std::size_t sync_every)
        : shards_{std::move(shards)}, is_weighted_{is_weighted}, sync_every_{sync_every} {
        for (std::size_t rank = 0; rank < shards_.size(); ++rank) {
            by_length_.push_back(static_cast<int>(rank));
            weight_ += shards_[rank].weight;
        }
        std::sort(by_length_.begin(), by_length_.end(), [this](int a, int b) {
            return std::pair{inputs_of(a), a} < std::pair{inputs_of(b), b};
        });
    }

    /// The notice of a round, for a rank that says nothing.
    [[nodiscard]] RoundCode code(std::size_t round) const noexcept {
        return {Phase::train, (round + 1) % sync_every_ == 0};
    }

    /// Checks what `rank` is about to say in `round`.
    /// @throws ContractViolation  it leaves earlier or later than it said at entry, votes to stop,
    /// or gives another notice.
    void require_promised(int rank, std::size_t round, RollCallLanes const& mine) const {
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
        RoundCode const said = RoundCode::decode(static_cast<std::uint32_t>(mine.code.sum));
        RoundCode const expected = code(round);
        if (said.phase != expected.phase || said.syncs != expected.syncs ||
            (mine.weighted != 0) != is_weighted_ ||
            mine.weight != weight_of(rank) * rounds_in_weight(expected)) {
            throw ContractViolation{
                "the notice of round " + to_text(round) +
                " differs from what JoinOptions::inputs, weight_per_input and sync_every fixed at "
                "entry; give no notice, or leave JoinOptions::inputs empty"
            };
        }
    }

    /// What all ranks say in the next round, summed; arriving() are those that arrive in it. Nobody
    /// is known to skip, so all active ranks are contributors.
    [[nodiscard]] RollCallLanes next() {
        arriving_.clear();
        carry_ = {};
        std::uint64_t const unsynced = round_ % sync_every_;
        while (joined_ < by_length_.size() && inputs_of(by_length_[joined_]) == round_) {
            std::uint64_t const weight = weight_of(by_length_[joined_]);
            weight_ -= weight;
            carry_.weight += is_weighted_ ? weight * unsynced : 0;
            carry_.ranks += unsynced != 0 ? 1 : 0;
            arriving_.push_back(by_length_[joined_++]);
        }
        RollCallLanes said;
        auto const active = static_cast<std::uint32_t>(by_length_.size() - joined_);
        RoundCode const fixed = code(round_++);
        Agreement const one = Agreement::of(fixed.encode());
        said.active = active;
        said.arrived = static_cast<std::uint32_t>(arriving_.size());
        said.weighted = is_weighted_ ? active : 0;
        said.contributors = active;
        said.weight = is_weighted_ ? weight_ * rounds_in_weight(fixed) : 0;
        said.code = {one.sum * active, one.squares * active};
        return said;
    }
    /// Ascending.
    [[nodiscard]] std::vector<int> const& arriving() const noexcept { return arriving_; }
    /// What they accumulated.
    [[nodiscard]] Carry const& carry() const noexcept { return carry_; }

private:
    /// A rank that is active has been in all rounds since the last one that synced.
    [[nodiscard]] std::uint64_t rounds_in_weight(RoundCode const& code) const noexcept {
        return code.syncs ? sync_every_ : 1;
    }
    [[nodiscard]] std::uint64_t inputs_of(int rank) const noexcept {
        return shards_[static_cast<std::size_t>(rank)].inputs;
    }
    [[nodiscard]] std::uint64_t weight_of(int rank) const noexcept {
        return shards_[static_cast<std::size_t>(rank)].weight;
    }

    std::vector<Shard> shards_;
    bool is_weighted_;
    std::size_t sync_every_;
    std::vector<int> by_length_; ///< shortest first, equal ones by rank
    std::uint64_t weight_ = 0;   ///< of all active ranks
    std::size_t joined_ = 0;
    std::size_t round_ = 0;
    std::vector<int> arriving_;
    Carry carry_;
};

}}} // namespace joinable::v0::detail
