// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <vector>

#include <joinable/config.hpp>
#include <joinable/device/device.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Exchanges two neighbours, `left` and `right` bytes long, by swapping blocks (Gries and Mills,
/// "Swapping sections", 1981): each byte is written at most twice, all in long runs.
void rotate_bytes(std::byte* first, std::size_t left, std::size_t right) noexcept;

/// Moves sections within one block of memory, without another block. `sections` are in the order of
/// `from`. There may be gaps between them, whose contents are lost. Complexity: linear in the bytes
/// if the order stays the same; else at most that times the square of the logarithm of the number
/// of sections.
void permute_sections(std::byte* memory, std::vector<Section>& sections) noexcept;

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/device/detail/impl/permute_sections.ipp>
#endif
