// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <joinable/bucket/bucket.hpp>
#include <joinable/bucket/gradients.hpp>
#include <joinable/config.hpp>
#include <joinable/device/device.hpp>
#include <joinable/optimizer/shard.hpp>
#include <joinable/participant/sharded/detail/arenas.hpp>
#include <joinable/participant/sharded/detail/group.hpp>
#include <joinable/tensor/parameters.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Gradients whose averages go to the owners of their parameters: a bucket for each shard. A bucket has memory from
/// its first gradient until the owners have its sum. A gradient is released when it is copied; on a device those of a
/// bucket are, when the last one is.
class GradientsForOwners final : public Gradients {
public:
    /// `parameters` are the parameters of all groups: of the list `groups` that the participant keeps, and of
    /// `next`, which it is about to add. Only this object uses `arenas` while gradients are reduced.
    GradientsForOwners(
        ParameterList parameters,
        std::vector<ShardGroup> const& groups,
        ShardGroup const& next,
        int rank,
        Device& device,
        BucketArenas& arenas
    );

    [[nodiscard]] std::vector<Bucket> const& buckets() const noexcept override { return buckets_; }
    /// The group of a bucket.
    [[nodiscard]] std::size_t group_of(std::size_t bucket) const noexcept {
        return slots_[bucket].group;
    }
    [[nodiscard]] OptimizerShard const& shard_of(std::size_t bucket) const {
        return groups_[slots_[bucket].group].shards[slots_[bucket].shard];
    }
    /// The parameter of a bucket whose gradient is ready last.
    [[nodiscard]] std::size_t first_in(std::size_t bucket) const noexcept {
        return slots_[bucket].first;
    }

    [[nodiscard]] bool receive_averages() const noexcept override { return false; }

    void begin(bool has_joined) override { begin_now(has_joined); }
    void begin_now(bool has_joined);
    void require_marked(std::size_t i) const override { require_marked_now(i); }
    void require_marked_now(std::size_t i) const;
    void pack(std::size_t i, double factor) override { pack_now(i, factor); }
    void pack_now(std::size_t i, double factor);
    void zero(std::size_t i) override { zero_now(i); }
    void zero_now(std::size_t i);
    void submit(std::vector<std::size_t> const& parameters) override { submit_now(parameters); }
    void submit_now(std::vector<std::size_t> const& parameters);
    void complete() override { complete_now(); }
    void complete_now();
    void end_guard() override { is_clear_ = false; }

    [[nodiscard]] bool waits_for_memory(std::size_t bucket) const override {
        return slots_[bucket].arena == nowhere && free_.empty() && arenas_in_use_ >= overlapping;
    }
    void give_back(std::size_t bucket) override { give_back_now(bucket); }
    void give_back_now(std::size_t bucket);

private:
    /// The number of buckets with memory, unless more fill at the same time: one travels while the next one fills.
    static constexpr std::size_t overlapping = 2;

    struct Slot {
        std::size_t group;
        std::size_t shard;
        std::size_t first; ///< the lowest parameter
        std::size_t arena = nowhere;
    };

    /// Writes a gradient into its bucket, which gets memory.
    void pack_into_bucket(std::size_t i, double factor);

    std::vector<ShardGroup> const& groups_;
    BucketArenas& arenas_;
    std::vector<Slot> slots_;           ///< per bucket
    std::vector<Bucket> buckets_;       ///< without views
    std::vector<std::size_t> piece_of_; ///< of each parameter: the piece at which it begins
    std::vector<bool> is_packed_;       ///< of each parameter: its gradient is to be released
    std::size_t arenas_in_use_ = 0;     ///< including free ones
    std::vector<std::size_t> free_;     ///< arenas
    bool has_joined_ = false;           ///< in this iteration
    bool is_clear_ = false;             ///< since this rank joined
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/participant/sharded/detail/gradients_for_owners.ipp>
#endif
