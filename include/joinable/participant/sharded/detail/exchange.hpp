// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <optional>
#include <type_traits>
#include <utility>

#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/scaled_sums.hpp>
#include <joinable/communicator/substitute.hpp>
#include <joinable/device/device.hpp>
#include <joinable/optimizer/shard.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/parameters.hpp>

/// @file
/// Exchanges of sharded buckets between ranks. Collective, the same on all ranks.

namespace joinable { inline namespace v0 { namespace detail {

/// Starts to fill a bucket with the parts of all ranks. This rank's part is at `own`, which may be
/// its place in the bucket.
template <Communicator Comm>
[[nodiscard]] auto
gather_parts(Comm& comm, OptimizerShard const& shard, std::byte const* own, std::byte* bucket) {
    ShardBucket const& layout = shard.bucket();
    return any_all_gather(
        comm,
        ConstBuffer{own, shard.part(), layout.dtype},
        Buffer{bucket, layout.count(), layout.dtype},
        layout.counts
    );
}

/// Whether the sum of gradient buckets takes a factor from each rank.
template <Communicator Comm>
[[nodiscard]] bool sum_scales_parts(Comm& comm) noexcept {
    constexpr bool can = ReduceScatters<Comm> ? ScalesScatteredSums<Comm> : ScalesSums<Comm>;
    return can && !scales_before_sum(comm);
}

/// The factors of gradients: while they are packed, and while they are summed.
struct ShardFactors {
    double packed = 0; ///< 0 packs zeros
    double summed = 1;

    /// Sums that scale save one rounding.
    template <Communicator Comm>
    [[nodiscard]] static ShardFactors of(Comm& comm, double factor) noexcept {
        bool const is_summed = sum_scales_parts(comm) && factor != 0.0;
        return is_summed ? ShardFactors{1.0, factor} : ShardFactors{factor, 1.0};
    }
};

/// Submits what was packed, and starts to sum a bucket of gradients, so that each rank gets its
/// part. The bucket is then undefined.
template <Communicator Comm>
[[nodiscard]] auto
start_parts(Comm& comm, OptimizerShard const& shard, std::byte* bucket, double factor) {
    ShardBucket const& layout = shard.bucket();
    shard.device().submit();
    // If the sum scales, also with zeros: all ranks run the same collective.
    return any_reduce_scatter(
        comm,
        Buffer{bucket, layout.count(), layout.dtype},
        Buffer{shard.gradients(), shard.part(), layout.dtype},
        sum_scales_parts(comm) ? std::optional{factor} : std::nullopt,
        layout.counts
    );
}

/// Sends the values of a bucket from their owners to all ranks. A lone parameter is sent in place,
/// and so are values that lie in the bucket.
template <Communicator Comm>
class ShardExchange {
public:
    /// `bucket` is memory for all parts; `has_values` says whether the values lie in it.
    ShardExchange(
        Comm& comm,
        ParameterList const& parameters,
        OptimizerShard const& shard,
        std::byte* bucket,
        bool has_values,
        Scratch& scratch
    )
        : parameters_{parameters}, shard_{shard}, bucket_{bucket}, has_values_{has_values} {
        Device& device = shard.device();
        if (AnyView const value = has_values ? AnyView{} : shard.lone_value(parameters)) {
            Buffer const whole{value.data(), value.numel(), value.dtype()};
            device.submit();
            static_cast<void>( // nvcc 13 warns of a dropped reference to a work
                lone_.emplace(comm.broadcast(whole, shard.bucket().pieces.front().owner))
            );
        } else {
            if (!has_values) {
                shard.pack_own(parameters, bucket, scratch);
            }
            device.submit();
            std::byte const* const own = bucket + shard.part_offset() * shard.element();
            static_cast<void>(parts_.emplace(gather_parts(comm, shard, own, bucket)));
        }
    }

    void finish() {
        if (lone_) {
            lone_->wait();
        } else {
            parts_->wait();
            if (!has_values_) {
                shard_.unpack_others(parameters_, bucket_);
                shard_.device().submit(); // before the bucket is filled again
            }
        }
    }

private:
    ParameterList const& parameters_;
    OptimizerShard const& shard_;
    std::byte const* bucket_;
    bool has_values_;
    std::optional<std::remove_cvref_t<decltype(std::declval<Comm&>().broadcast(Buffer{}, 0))>>
        lone_;
    std::optional<decltype(gather_parts(
        std::declval<Comm&>(), std::declval<OptimizerShard const&>(), nullptr, nullptr
    ))>
        parts_;
};

}}} // namespace joinable::v0::detail
