// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <joinable/config.hpp>
#include <joinable/join/detail/verdict.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The rounds of a guard whose ranks gave their numbers of inputs at entry. They determine what a
/// roll call would hear, so nothing is sent. Every rank has the same schedule.
class Schedule {
public:
    /// The words of one rank at entry.
    struct Shard {
        std::uint64_t inputs = 0;
        std::uint64_t weight = 0;       ///< of each input
        std::uint64_t held_batches = 0; ///< before the guard, see Window
        std::uint64_t held_weight = 0;  ///< of these
    };

    Schedule(std::vector<Shard> shards, bool is_weighted, std::size_t sync_every);

    /// The code of a round with the default notice.
    [[nodiscard]] RoundCode code(std::size_t round) const noexcept {
        return {Phase::train, (round + 1) % sync_every_ == 0};
    }

    /// Checks `rank`'s announcement of `round`.
    /// @throws ContractViolation  it leaves earlier or later than it said at entry, votes to stop,
    ///         or gives another notice.
    void require_promised(int rank, std::size_t round, RollCallLanes const& mine) const;

    /// The sum of what all ranks say in the next round; arriving() are the ranks that arrive in it.
    /// Skips are not known, so all active ranks are contributors.
    [[nodiscard]] RollCallLanes next();
    /// Ascending.
    [[nodiscard]] std::vector<int> const& arriving() const noexcept { return arriving_; }
    /// The batches that the arriving ranks accumulated.
    [[nodiscard]] Carry const& carry() const noexcept { return carry_; }

private:
    [[nodiscard]] std::uint64_t rounds_in_weight(RoundCode const& code) const noexcept {
        return code.syncs ? sync_every_ : 1;
    }
    /// The weight of `rank` in `round`. The rank has been in all rounds since the last one that synced.
    [[nodiscard]] std::uint64_t weight_in(int rank, std::size_t round) const noexcept {
        bool const is_first_sync = round + 1 == sync_every_;
        return shard(rank).weight * rounds_in_weight(code(round)) +
               (is_first_sync ? shard(rank).held_weight : 0);
    }
    [[nodiscard]] Shard const& shard(int rank) const noexcept {
        return shards_[static_cast<std::size_t>(rank)];
    }
    [[nodiscard]] std::uint64_t inputs_of(int rank) const noexcept { return shard(rank).inputs; }

    std::vector<Shard> shards_;
    bool is_weighted_;
    std::size_t sync_every_;
    std::vector<int> by_length_; ///< shortest first, equal ones by rank
    std::uint64_t weight_ = 0;   ///< of an input of all active ranks
    std::uint64_t held_ = 0;     ///< of all active ranks, before the guard
    std::size_t joined_ = 0;
    std::size_t round_ = 0;
    std::vector<int> arriving_;
    Carry carry_;
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/join/detail/impl/schedule.ipp>
#endif
