// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <vector>

#include <joinable/config.hpp>
#include <joinable/device/device.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Exchanges two ranges that do not overlap, through the stack.
void swap_bytes(std::byte* a, std::byte* b, std::size_t bytes) noexcept;

/// Exchanges two neighbours, `left` and `right` bytes long, by swapping blocks (Gries and Mills,
/// "Swapping sections", 1981): each byte is written at most twice, all in long runs.
void rotate_bytes(std::byte* first, std::size_t left, std::size_t right) noexcept;

[[nodiscard]] std::size_t bytes_of(Section const* sections, std::size_t count) noexcept;

/// Moves the sections whose position is below `pivot` in front of the others, keeping the order of
/// both, and their bytes with them. `base` is where the first one is. Returns how many go in front.
std::size_t partition_sections(
    std::byte* base, Section* sections, std::size_t count, std::size_t pivot
) noexcept;

/// Sorts neighbouring sections by position, and their bytes with them. `first` is the lowest
/// position; none is missing.
void sort_sections(
    std::byte* base, Section* sections, std::size_t count, std::size_t first = 0
) noexcept;

/// Moves sections inside one piece of memory, without another. `sections` are in the order of
/// `from`; gaps between them may be anywhere, and their contents are lost.
/// Complexity: of the bytes, linear where the order stays, else times the square of the logarithm of
/// the number of sections at most.
void permute_sections(std::byte* memory, std::vector<Section>& sections) noexcept;

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/device/detail/permute_sections.ipp>
#endif
