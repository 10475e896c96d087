// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/participant/sharded/detail/bucket_values.hpp>

#include <atomic>
#include <new>
#include <utility>

#include <joinable/detail/text.hpp>
#include <joinable/device/device.hpp>
#include <joinable/error.hpp>
#include <joinable/participant/sharded/detail/values.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION BucketValues::BucketValues(
    ParameterList const& parameters,
    std::span<OptimizerShard const> shards,
    BufferMemory const& memory
)
    : parameters_{parameters}, from_{memory}, places_(parameters.size()) {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        if (parameters[i].requires_grad()) {
            require_settable(
                parameters, i, "lie in a bucket", "turn parameters_as_bucket_view off"
            );
        }
    }
    std::size_t bytes = 0;
    for (OptimizerShard const& shard : shards) {
        begins_.push_back(bytes);
        bytes += (shard.bucket_bytes() + 63) / 64 * 64;
    }
    if (bytes != 0) { // one arena for all, because each costs up to two more pages
        memory_ = memory.allocate(bytes);
    }
    for (std::size_t k = 0; k < shards.size(); ++k) {
        for (ShardPiece const& piece : shards[k].bucket().pieces) {
            std::size_t const i = piece.parameter;
            if (piece.begin == 0) {
                std::byte* const begin = bucket(k) + piece.offset * shards[k].element();
                places_[i] = OptimizerShard::place_of(parameters[i].value(), begin);
            }
        }
    }
}

JOINABLE_DEFINITION BucketValues::~BucketValues() {
    for (std::size_t i = 0; i < taken_; ++i) {
        if (places_[i] && is_in_place(i)) {
            parameters_[i].release_value();
        }
    }
}

JOINABLE_DEFINITION void BucketValues::take() {
    for (std::size_t i = 0; i < places_.size(); ++i) {
        if (places_[i]) {
            from_.device().copy(parameters_[i].value(), places_[i]);
        }
    }
    from_.device().finish(); // before the engine's memory ends
    for (std::size_t i = 0; i < places_.size(); ++i) {
        taken_ = i + 1;
        if (!places_[i]) {
            continue;
        }
        parameters_[i].set_value(places_[i]);
        if (!is_in_place(i)) {
            throw ContractViolation{concat(
                "set_value copies the value of ",
                describe_parameter(parameters_, i),
                ", but parameters_as_bucket_view needs a view; turn it off"
            )};
        }
    }
}

JOINABLE_DEFINITION void BucketValues::leave() noexcept {
    struct Left {
        Arena memory;
        Left* next;
    };
    static std::atomic<Left*> first{nullptr}; // so that no leak checker misses them
    if (taken_ == 0) {
        return;
    }
    auto* const left = new (std::nothrow) Left{std::move(memory_), first.load()};
    if (left == nullptr) {
        return; // the destructor releases the values
    }
    while (!first.compare_exchange_weak(left->next, left)) {
    }
    taken_ = 0;
}

JOINABLE_DEFINITION void BucketValues::check() const {
    for (std::size_t i = 0; i < places_.size(); ++i) {
        if (places_[i] && !is_in_place(i)) {
            throw ContractViolation{concat(
                "the value of ",
                describe_parameter(parameters_, i),
                " is not in the bucket any more, where parameters_as_bucket_view put it; write new values "
                "into the memory of the old ones"
            )};
        }
    }
}

}}} // namespace joinable::v0::detail
