// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include <joinable/bucket/memory.hpp>
#include <joinable/config.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/optimizer/shard.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/parameters.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The values of a group of parameters in the buckets in which they travel, one for each shard, so
/// that no step copies them. Local.
class BucketValues {
public:
    /// Allocates the buckets.
    /// @throws ContractViolation  a value cannot be set.
    BucketValues(
        ParameterList const& parameters,
        std::span<OptimizerShard const> shards,
        BufferMemory const& memory
    );
    BucketValues(BucketValues const&) = delete;
    BucketValues& operator=(BucketValues const&) = delete;
    /// Releases the values, whose memory ends here.
    ~BucketValues();

    /// Moves the engine's values into the buckets.
    /// @throws ContractViolation  set_value copies.
    void take();
    /// After take() was refused on any rank: leaves the values that were set where they are, in
    /// memory that lives as long as this process. The engine may have freed its own.
    void leave() noexcept;
    /// @throws ContractViolation  the engine has moved a value.
    void check() const;

    [[nodiscard]] std::byte* bucket(std::size_t shard) const noexcept {
        return memory_.data() + begins_[shard];
    }
    [[nodiscard]] std::size_t bytes() const noexcept { return memory_.bytes(); }

private:
    [[nodiscard]] bool is_in_place(std::size_t i) const {
        AnyView const value = parameters_[i].value();
        return places_[i].numel() == 0 || (value && value.data() == places_[i].data());
    }

    ParameterList parameters_;
    BufferMemory from_;
    Arena memory_;
    std::vector<std::size_t> begins_; ///< of each bucket, in bytes
    std::vector<AnyView> places_;     ///< of each parameter; empty if it is not stepped
    std::size_t taken_ = 0;           ///< parameters whose values were set
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/participant/sharded/detail/impl/bucket_values.ipp>
#endif
