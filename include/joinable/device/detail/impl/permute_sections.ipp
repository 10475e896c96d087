// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/device/detail/permute_sections.hpp>

#include <algorithm>
#include <array>
#include <cstring>

namespace joinable { inline namespace v0 { namespace detail {

/// Exchanges two ranges that do not overlap, through a buffer on the stack.
inline void swap_bytes(std::byte* a, std::byte* b, std::size_t bytes) noexcept {
    std::array<std::byte, 4096> buffer;
    while (bytes != 0) {
        std::size_t const n = (std::min)(bytes, buffer.size());
        std::memcpy(buffer.data(), a, n);
        std::memcpy(a, b, n);
        std::memcpy(b, buffer.data(), n);
        a += n;
        b += n;
        bytes -= n;
    }
}

JOINABLE_DEFINITION void
rotate_bytes(std::byte* first, std::size_t left, std::size_t right) noexcept {
    while (left != 0 && right != 0) {
        std::size_t const n = (std::min)(left, right);
        swap_bytes(first, first + left, n);
        first += n;
        (left <= right ? right : left) -= n;
    }
}

[[nodiscard]] inline std::size_t bytes_of(Section const* sections, std::size_t count) noexcept {
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < count; ++i) {
        bytes += sections[i].bytes;
    }
    return bytes;
}

/// Moves the sections with a position below `pivot` before the others, with their bytes. The order
/// within both groups is kept. `base` is the address of the first section. Returns the number of
/// sections before the others.
inline std::size_t partition_sections(
    std::byte* base, Section* sections, std::size_t count, std::size_t pivot
) noexcept {
    if (count < 2) {
        return count == 1 && sections->position < pivot ? 1 : 0;
    }
    std::size_t const half = count / 2;
    Section* const high = sections + half;
    std::size_t const low_bytes = bytes_of(sections, half);
    std::size_t const low_front = partition_sections(base, sections, half, pivot);
    std::size_t const high_front = partition_sections(base + low_bytes, high, count - half, pivot);
    std::size_t const kept = bytes_of(sections, low_front);
    rotate_bytes(base + kept, low_bytes - kept, bytes_of(high, high_front));
    rotate_bytes(
        reinterpret_cast<std::byte*>(sections + low_front),
        (half - low_front) * sizeof(Section),
        high_front * sizeof(Section)
    );
    return low_front + high_front;
}

/// Sorts adjacent sections by position, with their bytes. `first` is the lowest position; the
/// positions have no gaps.
inline void sort_sections(
    std::byte* base, Section* sections, std::size_t count, std::size_t first = 0
) noexcept {
    std::size_t sorted = 0;
    while (sorted < count && sections[sorted].position == first + sorted) {
        ++sorted;
    }
    if (sorted < count) {
        std::size_t const half = count / 2;
        partition_sections(base, sections, count, first + half);
        sort_sections(base, sections, half, first);
        sort_sections(base + bytes_of(sections, half), sections + half, count - half, first + half);
    }
}

JOINABLE_DEFINITION void
permute_sections(std::byte* memory, std::vector<Section>& sections) noexcept {
    std::size_t end = 0;
    for (Section const& section : sections) { // closes the gaps
        std::memmove(memory + end, memory + section.from, section.bytes);
        end += section.bytes;
    }
    sort_sections(memory, sections.data(), sections.size());
    for (std::size_t i = sections.size(); i-- > 0;) { // opens the new ones
        end -= sections[i].bytes;
        std::memmove(memory + sections[i].to, memory + end, sections[i].bytes);
    }
}

}}} // namespace joinable::v0::detail
