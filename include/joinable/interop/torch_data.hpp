// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/data/samplers/base.h>
#include <torch/serialize/archive.h>

#include <joinable/data/shard.hpp>
#include <joinable/data/shuffle.hpp>

/// @file
/// Shards for the data loaders of libtorch's C++. Opt-in; needs libtorch 1.13 or later:
/// ```cpp
/// auto loader = torch::data::make_data_loader(
///     dataset, joinable::torch::ShardSampler{count, comm, {.seed = 7}}, batch_size);
/// joinable::Join join{joinable::participants(ddp, step)};
/// for (auto& batch : join.iterate(*loader)) { ... }         // another number of batches on each rank
/// ```

namespace joinable { inline namespace v0 { namespace detail {

using TorchSampler = ::torch::data::samplers::Sampler<>;
/// Indices or none, as the optional that this libtorch has.
using TorchIndices = decltype(std::declval<TorchSampler&>().next(0));

template <template <class...> class Optional, class... Contents>
Optional<std::size_t> torch_size_like(Optional<Contents...> const&);
using TorchSize = decltype(torch_size_like(std::declval<TorchIndices const&>()));

}}} // namespace joinable::v0::detail

namespace joinable { inline namespace v0 { namespace torch {

/// Draws the indices of a data set that one rank has, as joinable::shard() deals them: each index
/// belongs to one rank, nothing is padded and nothing is dropped. libtorch's DistributedSampler pads
/// or drops, so that all ranks have as many. Here they may differ by one, which a Join guard allows.
/// A DataLoaderOptions::drop_last still drops what does not fill a batch. Local.
class ShardSampler : public detail::TorchSampler {
public:
    /// The shard of `count` elements for a rank, which is a communicator or `{rank, size}`. In order.
    ShardSampler(std::size_t count, Share share) : share_{share}, count_{count} { deal(); }
    /// In the order of an epoch, which all ranks share. A data loader begins the next epoch with
    /// each begin(), so begin it on all ranks.
    ShardSampler(std::size_t count, Share share, Shuffle shuffle)
        : share_{share}, count_{count}, shuffle_{shuffle} {
        deal();
    }

    /// Begins again, with the next epoch if indices were drawn since the last time.
    void reset(detail::TorchSize count = {}) override {
        if (std::exchange(is_loaded_, false) && count.value_or(count_) == count_) {
            return; // a data loader resets its sampler before it begins
        }
        if (shuffle_ && is_drawn_) {
            ++shuffle_->epoch;
        }
        is_drawn_ = false;
        count_ = count.has_value() ? *count : count_;
        next_ = 0;
        deal();
    }
    /// Up to `batch_size` indices; none at the end.
    detail::TorchIndices next(std::size_t batch_size) override {
        is_drawn_ = true;
        is_loaded_ = false;
        std::size_t const end = next_ + (std::min)(batch_size, mine_.size() - next_);
        if (end == next_) {
            return {};
        }
        auto const at = [&](std::size_t i) {
            return mine_.begin() + static_cast<std::ptrdiff_t>(i);
        };
        return std::vector<std::size_t>(at(std::exchange(next_, end)), at(end));
    }
    /// How many indices this rank has.
    [[nodiscard]] std::size_t size() const noexcept { return mine_.size(); }

    /// Writes the epoch and the place in it. The rest is what the constructor is given.
    void save(::torch::serialize::OutputArchive& archive) const override {
        archive.write("epoch", as_value(shuffle_ ? shuffle_->epoch : 0));
        archive.write("next", as_value(next_));
    }
    /// Continues where another one was saved, which was made by the same arguments; so does a data loader that
    /// begins with it. What a loader has fetched ahead counts as drawn.
    void load(::torch::serialize::InputArchive& archive) override {
        if (shuffle_) {
            shuffle_->epoch = read(archive, "epoch");
        }
        deal();
        next_ = (std::min)(static_cast<std::size_t>(read(archive, "next")), mine_.size());
        is_drawn_ = next_ != 0;
        is_loaded_ = true;
    }

private:
    static c10::IValue as_value(std::uint64_t number) {
        return c10::IValue{static_cast<std::int64_t>(number)};
    }
    static std::uint64_t read(::torch::serialize::InputArchive& archive, char const* key) {
        c10::IValue value;
        archive.read(key, value);
        return static_cast<std::uint64_t>(value.toInt());
    }
    void deal() {
        std::vector<std::size_t> const order =
            shuffle_ ? permutation(count_, *shuffle_) : std::vector<std::size_t>{};
        auto const positions = detail::Stride::of(count_, share_);
        mine_.resize(positions.size());
        for (std::size_t i = 0; i < mine_.size(); ++i) {
            mine_[i] = shuffle_ ? order[positions[i]] : positions[i];
        }
    }

    Share share_;
    std::size_t count_;
    std::optional<Shuffle> shuffle_ = {};
    std::vector<std::size_t> mine_ = {};
    std::size_t next_ = 0;
    bool is_drawn_ = false;  ///< since the epoch began
    bool is_loaded_ = false; ///< and nothing was drawn or reset since
};

}}} // namespace joinable::v0::torch
