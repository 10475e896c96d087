// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>

/// @file
/// Where one way of doing a thing becomes better than another. None of these changes a result.
/// tests/benchmarks/tune.py measures each number beside others and prints this table anew.

namespace joinable { inline namespace v0 { namespace detail { namespace tuning {

/// Up to so many bytes every rank combines all contributions for itself, beyond ranks share the work.
inline constexpr std::size_t slot_bytes = 2048;
/// Up to so many bytes in all, each rank has one chunk; beyond there are several, to take over.
inline constexpr std::size_t one_chunk_bytes = std::size_t{256} << 10U;
inline constexpr std::size_t chunks_per_rank = 4;
inline constexpr std::size_t largest_chunk_bytes = std::size_t{256} << 10U;

/// A message of which some rank's buffer is out of the others' reach moves in slices of so many bytes,
/// unless all of it fits in so many of them. Where ranks share cores, each meeting costs a switch.
inline constexpr std::size_t slice_bytes = std::size_t{128} << 10U;
inline constexpr std::size_t crowded_slice_bytes = std::size_t{512} << 10U;
inline constexpr std::size_t slices_per_ring = 4;

/// How often a wait looks before it yields its core: where every rank has one, and where not.
inline constexpr int spins = 200;
inline constexpr int crowded_spins = 20;
/// How often it yields before it sleeps.
inline constexpr int yields = 100;

}}}} // namespace joinable::v0::detail::tuning
