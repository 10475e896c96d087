// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>

/// @file
/// Thresholds between two ways of doing the same thing. None of them changes a result.
/// tests/benchmarks/tune.py measures alternatives to each number and prints this table again.

namespace joinable { inline namespace v0 { namespace detail { namespace tuning {

/// Up to this many bytes every rank combines all contributions for itself; beyond it ranks share
/// the work.
inline constexpr std::size_t slot_bytes = 2048;
/// Up to this many bytes in all, each rank has one chunk; beyond it there are several, which others
/// may take over.
inline constexpr std::size_t one_chunk_bytes = std::size_t{256} << 10U;
inline constexpr std::size_t chunks_per_rank = 4;
inline constexpr std::size_t largest_chunk_bytes = std::size_t{256} << 10U;

/// A message moves in slices of this many bytes if other ranks cannot reach some rank's buffer,
/// unless all of it fits in this many slices. If ranks share cores, each meeting costs a context
/// switch.
inline constexpr std::size_t slice_bytes = std::size_t{128} << 10U;
inline constexpr std::size_t crowded_slice_bytes = std::size_t{512} << 10U;
inline constexpr std::size_t slices_per_ring = 4;

/// How often a wait checks before it yields its core: if every rank has a core, and if not.
inline constexpr int spins = 200;
inline constexpr int crowded_spins = 20;
/// How often a wait yields before it sleeps.
inline constexpr int yields = 100;

}}}} // namespace joinable::v0::detail::tuning
