// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/participant/sharded/detail/gradients_for_owners.hpp>

#include <algorithm>
#include <utility>

#include <joinable/bucket/without_pass.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION GradientsForOwners::GradientsForOwners(
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
            Planned one{{g, s, nowhere}, {{nullptr, layout.count(), layout.dtype}, {}, {}}};
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
    free_.reserve(buckets_.size());
    arenas_.reserve((std::min)(buckets_.size(), overlapping), largest);
}

JOINABLE_DEFINITION void GradientsForOwners::begin_now(bool has_joined) {
    has_joined_ = has_joined;
    is_packed_.assign(is_packed_.size(), false);
    free_.clear();
    arenas_in_use_ = 0;
    for (Slot& slot : slots_) {
        slot.arena = nowhere;
    }
}

JOINABLE_DEFINITION void GradientsForOwners::require_marked_now(std::size_t i) const {
    if (!has(i) && !parameters_[i].can_set_grad()) {
        throw ContractViolation{
            describe(i) +
            " was marked ready, but has no gradient; give it one before, or give the parameter to "
            "backward() as unused"
        };
    }
}

JOINABLE_DEFINITION void GradientsForOwners::pack_now(std::size_t i, double factor) {
    pack_into_bucket(i, factor);
    if (is_on_host(device())) {
        parameters_[i].release_grad();
    } else {
        is_packed_[i] = true;
    }
}

JOINABLE_DEFINITION void GradientsForOwners::zero_now(std::size_t i) {
    pack_into_bucket(i, 0.0);
}

JOINABLE_DEFINITION void GradientsForOwners::pack_into_bucket(std::size_t i, double factor) {
    std::size_t const bucket = bucket_of_[i];
    Slot& slot = slots_[bucket];
    if (slot.arena == nowhere) {
        if (free_.empty()) {
            free_.push_back(arenas_in_use_++);
        }
        std::size_t const arena = free_.back();
        Buffer& buffer = buckets_[bucket].buffer;
        buffer.data =
            arenas_.data(arena, buffer.bytes()); // if this throws, the next gradient tries again
        free_.pop_back();
        slot.arena = arena;
    }
    auto* const memory = static_cast<std::byte*>(buckets_[bucket].buffer.data);
    ParameterList const& parameters = groups_[slot.group].parameters;
    shard_of(bucket).pack_gradient(parameters, piece_of_[i], factor, memory);
}

JOINABLE_DEFINITION void GradientsForOwners::submit_now(std::vector<std::size_t> const& parameters
) {
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

JOINABLE_DEFINITION void GradientsForOwners::complete_now() {
    bool const is_first = has_joined_ && !std::exchange(is_clear_, true);
    if (is_first) { // what was sent or dropped does not count again
        for (std::size_t const i : trained_) {
            clear_gradient(parameters_[i], device());
        }
    }
}

JOINABLE_DEFINITION void GradientsForOwners::give_back_now(std::size_t bucket) {
    free_.push_back(std::exchange(slots_[bucket].arena, nowhere));
}

}}} // namespace joinable::v0::detail
