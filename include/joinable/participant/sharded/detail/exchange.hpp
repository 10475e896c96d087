// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/scaled_sums.hpp>
#include <joinable/communicator/substitute.hpp>
#include <joinable/optimizer/shard.hpp>
#include <joinable/optimizer/stepped_gradients.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/dtype.hpp>
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

/// Sends values of a bucket from their owners to all ranks: a large piece from where it lies, or the others packed. Values
/// that lie in the bucket are sent there.
template <Communicator Comm>
class ShardExchange {
public:
    /// Sends the `counts` values of each rank from `bucket`, where they lie, or into which they are packed by `scratch`.
    ShardExchange(
        Comm& comm,
        ParameterList const& parameters,
        OptimizerShard const& shard,
        std::byte* bucket,
        std::vector<std::size_t> const& counts,
        Scratch* scratch
    )
        : parameters_{parameters}, shard_{shard}, packed_{scratch != nullptr ? bucket : nullptr} {
        std::size_t const before =
            sum_of(std::span{counts}.first(static_cast<std::size_t>(comm.rank())));
        std::byte* const own = bucket + before * shard.element();
        if (scratch != nullptr) {
            shard.pack_own(parameters, own, *scratch);
        }
        shard.device().submit();
        DType const dtype = shard.bucket().dtype;
        std::size_t const part = counts[static_cast<std::size_t>(comm.rank())];
        static_cast<void>(parts_.emplace(any_all_gather(
            comm, ConstBuffer{own, part, dtype}, Buffer{bucket, sum_of(counts), dtype}, counts
        )));
    }
    /// Sends the stepped rows of the only parameter, whose number all ranks know.
    ShardExchange(
        Comm& comm, ParameterList const& parameters, OptimizerShard const& shard, SteppedRows& rows
    )
        : parameters_{parameters}, shard_{shard}, rows_{&rows} {
        if (!rows.indices.empty()) {
            start_rows(comm);
        }
    }
    /// Sends a piece from where it lies.
    ShardExchange(
        Comm& comm,
        ParameterList const& parameters,
        OptimizerShard const& shard,
        ShardPiece const& piece
    )
        : parameters_{parameters}, shard_{shard} {
        AnyView const run = shard.lone_run(parameters, piece);
        shard.device().submit();
        static_cast<void>( // nvcc 13 warns of a dropped reference to a work
            lone_.emplace(comm.broadcast({run.data(), run.numel(), run.dtype()}, piece.owner))
        );
    }

    void finish() {
        if (rows_ != nullptr) {
            if (row_values_) {
                lone_->wait();
                row_values_->wait();
                if (shard_.own().empty()) {
                    shard_.copy_rows(parameters_, *rows_, false);
                }
            }
        } else if (lone_) {
            lone_->wait();
        } else {
            parts_->wait();
            if (packed_ != nullptr) {
                shard_.unpack_others(parameters_, packed_);
                shard_.device().submit(); // before the bucket is filled again
            }
        }
    }

private:
    using Broadcast = std::remove_cvref_t<decltype(std::declval<Comm&>().broadcast(Buffer{}, 0))>;

    void start_rows(Comm& comm) {
        std::size_t const count = rows_->indices.size();
        std::size_t const bytes = count * shard_.row_bytes(parameters_);
        int const owner = shard_.bucket().pieces.front().owner;
        rows_->values.resize(bytes);
        if (!shard_.own().empty()) {
            shard_.copy_rows(parameters_, *rows_, true);
        }
        Buffer const indices{rows_->indices.data(), count, DType::i64};
        Buffer const values{rows_->values.data(), bytes / shard_.element(), shard_.bucket().dtype};
        static_cast<void>(lone_.emplace(comm.broadcast(indices, owner)));
        static_cast<void>(row_values_.emplace(comm.broadcast(values, owner)));
    }

    ParameterList const& parameters_;
    OptimizerShard const& shard_;
    std::byte const* packed_ = nullptr;
    SteppedRows* rows_ = nullptr;
    std::optional<Broadcast> lone_; ///< or the indices of rows
    std::optional<Broadcast> row_values_;
    std::optional<decltype(any_all_gather(std::declval<Comm&>(), ConstBuffer{}, Buffer{}, Counts{})
    )>
        parts_;
};

/// Exchanges that are in flight in turns, at most two at a time.
template <Communicator Comm>
class ShardExchanges {
public:
    /// The turn of the next exchange: 0 or 1.
    [[nodiscard]] std::size_t turn() const noexcept { return turn_; }
    [[nodiscard]] bool has_any() const noexcept { return in_flight_[0] || in_flight_[1]; }
    /// Starts one, then finishes the one before.
    template <class... What>
    void start(What&&... what) {
        static_cast<void>(in_flight_[turn_].emplace(what...));
        finish_one();
    }
    void finish_one() {
        turn_ = 1 - turn_;
        if (auto& exchange = in_flight_[turn_]) {
            exchange->finish();
            exchange.reset();
        }
    }

private:
    std::optional<ShardExchange<Comm>> in_flight_[2];
    std::size_t turn_ = 0;
};

}}} // namespace joinable::v0::detail
