// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include <joinable/config.hpp>
#include <joinable/participant/sharded/detail/group.hpp>

namespace joinable { inline namespace v0 { namespace detail {

// What the shards of a rank, or of all ranks, take. Local.

/// A line for each rank. @see ShardedOptimizer::table
[[nodiscard]] std::string table_of_shards(std::span<ShardGroup const> groups, std::size_t ranks);
/// Bytes of averaged gradients that this rank keeps.
[[nodiscard]] std::size_t gradient_bytes_of(std::span<ShardGroup const> groups) noexcept;
/// Bytes of values that this rank keeps, or that lie in buckets.
[[nodiscard]] std::size_t value_bytes_of(std::span<ShardGroup const> groups) noexcept;
/// Bytes of optimizer state on this rank.
[[nodiscard]] std::size_t state_bytes_of(std::span<ShardGroup const> groups) noexcept;

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/participant/sharded/detail/sizes.ipp>
#endif
