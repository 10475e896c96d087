// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <span>

namespace joinable::inline v0::detail {

/// A range of bytes, and where it is to be.
struct Section {
    std::size_t from;
    std::size_t to;
    std::size_t bytes;
    std::size_t position = 0; ///< in the order of `to`
};

/// Exchanges two ranges that do not overlap, through the stack.
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

/// Exchanges two neighbours, `left` and `right` bytes long, by swapping blocks (Gries and Mills,
/// "Swapping sections", 1981): each byte is written at most twice, all in long runs.
inline void rotate_bytes(std::byte* first, std::size_t left, std::size_t right) noexcept {
    while (left != 0 && right != 0) {
        std::size_t const n = (std::min)(left, right);
        swap_bytes(first, first + left, n);
        first += n;
        (left <= right ? right : left) -= n;
    }
}

[[nodiscard]] inline std::size_t bytes_of(std::span<Section const> sections) noexcept {
    std::size_t bytes = 0;
    for (Section const& section : sections) {
        bytes += section.bytes;
    }
    return bytes;
}

/// Moves the sections whose position is below `pivot` in front of the others, keeping the order of both.
/// `base` is where the first one is. Returns how many go in front.
inline std::size_t
partition_sections(std::byte* base, std::span<Section> sections, std::size_t pivot) noexcept {
    if (sections.size() < 2) {
        return !sections.empty() && sections.front().position < pivot ? 1 : 0;
    }
    auto const low = sections.first(sections.size() / 2);
    auto const high = sections.subspan(low.size());
    std::size_t const low_front = partition_sections(base, low, pivot);
    std::size_t const high_front = partition_sections(base + bytes_of(low), high, pivot);
    rotate_bytes(
        base + bytes_of(low.first(low_front)),
        bytes_of(low.subspan(low_front)),
        bytes_of(high.first(high_front))
    );
    auto const begin = sections.begin();
    std::rotate(
        begin + static_cast<std::ptrdiff_t>(low_front),
        begin + static_cast<std::ptrdiff_t>(low.size()),
        begin + static_cast<std::ptrdiff_t>(low.size() + high_front)
    );
    return low_front + high_front;
}

/// Sorts neighbouring sections by position, and their bytes with them. `first` is the lowest position;
/// none is missing.
inline void
sort_sections(std::byte* base, std::span<Section> sections, std::size_t first = 0) noexcept {
    bool const is_sorted =
        std::is_sorted(sections.begin(), sections.end(), [](Section const& a, Section const& b) {
            return a.position < b.position;
        });
    if (!is_sorted) {
        std::size_t const half = sections.size() / 2;
        partition_sections(base, sections, first + half);
        sort_sections(base, sections.first(half), first);
        sort_sections(base + bytes_of(sections.first(half)), sections.subspan(half), first + half);
    }
}

/// Moves sections inside one piece of memory, without another. Gaps between them may be anywhere, and
/// their contents are lost. The places are distinct, as many before as after.
/// Complexity: of the bytes, linear where the order stays, else times the square of the logarithm of
/// the number of sections at most.
inline void permute_sections(std::byte* memory, std::span<Section> sections) noexcept {
    auto const by = [](std::size_t Section::* place) {
        return [place](Section const& a, Section const& b) { return a.*place < b.*place; };
    };
    std::sort(sections.begin(), sections.end(), by(&Section::to));
    for (std::size_t i = 0; i < sections.size(); ++i) {
        sections[i].position = i;
    }
    std::sort(sections.begin(), sections.end(), by(&Section::from));
    std::size_t end = 0;
    for (Section const& section : sections) { // closes the gaps
        std::memmove(memory + end, memory + section.from, section.bytes);
        end += section.bytes;
    }
    sort_sections(memory, sections);
    for (std::size_t i = sections.size(); i-- > 0;) { // opens the new ones
        end -= sections[i].bytes;
        std::memmove(memory + sections[i].to, memory + end, sections[i].bytes);
    }
}

} // namespace joinable::inline v0::detail
