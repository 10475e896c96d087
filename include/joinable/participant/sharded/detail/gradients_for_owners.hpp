// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include <joinable/bucket/bucket.hpp>
#include <joinable/bucket/gradients.hpp>
#include <joinable/bucket/without_pass.hpp>
#include <joinable/device/device.hpp>
#include <joinable/error.hpp>
#include <joinable/optimizer/shard.hpp>
#include <joinable/participant/sharded/detail/group.hpp>
#include <joinable/participant/sharded/detail/value_store.hpp>
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
    )
        : Gradients{std::move(parameters), {}, rank, device}, groups_{groups}, arenas_{arenas},
          piece_of_(bucket_of_.size()), is_packed_(bucket_of_.size()) {
        struct Planned {
            Slot slot;
            Bucket bucket;
        };
        std::vector<Planned> planned;
        std::size_t largest = 0;
        for (std::size_t g = 0; g <= groups.size(); ++g) {
            ShardGroup const& group = g == groups.size() ? next : groups[g];
            for (std::size_t s = 0; s < group.shards.size(); ++s) {
                ShardBucket const& layout = group.shards[s].bucket();
                largest = (std::max)(largest, group.shards[s].bucket_bytes());
                Planned one{
                    {g, s, BucketArenas::none}, {{nullptr, layout.count(), layout.dtype}, {}, {}}
                };
                for (std::size_t p = 0; p < layout.pieces.size(); ++p) {
                    if (layout.pieces[p].begin == 0) {
                        std::size_t const i = group.first + layout.pieces[p].parameter;
                        piece_of_[i] = p;
                        one.bucket.parameters.push_back(i);
                        one.slot.first = (std::min)(one.slot.first, i);
                    }
                }
                planned.push_back(std::move(one));
            }
        }
        // The order in which buckets fill when gradients become ready from the last one to the first.
        std::sort(planned.begin(), planned.end(), [](Planned const& a, Planned const& b) {
            return a.slot.first > b.slot.first;
        });
        for (Planned& one : planned) {
            for (std::size_t const i : one.bucket.parameters) {
                bucket_of_[i] = buckets_.size();
            }
            slots_.push_back(one.slot);
            buckets_.push_back(std::move(one.bucket));
        }
        for (std::size_t i = bucket_of_.size(); i-- > 0;) {
            if (is_trained(i)) {
                trained_.push_back(i);
            }
        }
        arenas_.reserve((std::min)(buckets_.size(), overlapping), largest);
    }

    [[nodiscard]] std::vector<Bucket> const& buckets() const noexcept override { return buckets_; }
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

    void begin(bool has_joined) override {
        has_joined_ = has_joined;
        is_packed_.assign(is_packed_.size(), false);
        arenas_.give_back_all();
        for (Slot& slot : slots_) {
            slot.arena = BucketArenas::none;
        }
    }

    void require_marked(std::size_t i) const override {
        if (!has(i) && !parameters_[i].can_set_grad()) {
            throw ContractViolation{
                describe(i) +
                " was marked ready, but has no gradient; give it one before, or give the parameter to "
                "backward() as unused"
            };
        }
    }

    void pack(std::size_t i, double factor) override {
        pack_into_bucket(i, factor);
        if (is_on_host(device())) {
            parameters_[i].release_grad();
        } else {
            is_packed_[i] = true;
        }
    }

    void zero(std::size_t i) override { pack_into_bucket(i, 0.0); }

    void submit(std::vector<std::size_t> const& parameters) override {
        if (is_on_host(device())) {
            return;
        }
        device().finish();
        for (std::size_t const i : parameters) {
            if (is_packed_[i]) {
                is_packed_[i] = false;
                parameters_[i].release_grad();
            }
        }
    }

    void complete() override {
        bool const is_first = has_joined_ && !std::exchange(is_clear_, true);
        if (is_first) { // what was sent or dropped does not count again
            for (std::size_t const i : trained_) {
                clear_gradient(parameters_[i], device());
            }
        }
    }

    void end_guard() override { is_clear_ = false; }

    [[nodiscard]] bool waits_for_memory(std::size_t bucket) const override {
        return slots_[bucket].arena == BucketArenas::none && arenas_.are_taken(overlapping);
    }
    void give_back(std::size_t bucket) override { arenas_.give_back(slots_[bucket].arena); }

private:
    /// The number of buckets with memory, unless more fill at the same time: one travels while the next one fills.
    static constexpr std::size_t overlapping = 2;

    struct Slot {
        std::size_t group;
        std::size_t shard;
        std::size_t first; ///< the lowest parameter
        std::size_t arena = BucketArenas::none;
    };

    /// Writes a gradient into its bucket, which gets memory.
    void pack_into_bucket(std::size_t i, double factor) {
        std::size_t const bucket = bucket_of_[i];
        Slot& slot = slots_[bucket];
        if (slot.arena == BucketArenas::none) {
            Buffer& buffer = buckets_[bucket].buffer;
            slot.arena =
                arenas_.take(buffer.bytes()); // if this throws, the next gradient tries again
            buffer.data = arenas_.data(slot.arena, buffer.bytes());
        }
        auto* const memory = static_cast<std::byte*>(buckets_[bucket].buffer.data);
        ParameterList const& parameters = groups_[slot.group].parameters;
        shard_of(bucket).pack_gradient(parameters, piece_of_[i], factor, memory);
    }

    std::vector<ShardGroup> const& groups_;
    BucketArenas& arenas_;
    std::vector<Slot> slots_;           ///< per bucket
    std::vector<Bucket> buckets_;       ///< without views
    std::vector<std::size_t> piece_of_; ///< of each parameter: the piece at which it begins
    std::vector<bool> is_packed_;       ///< of each parameter: its gradient is to be released
    bool has_joined_ = false;           ///< in this iteration
    bool is_clear_ = false;             ///< since this rank joined
};

}}} // namespace joinable::v0::detail
