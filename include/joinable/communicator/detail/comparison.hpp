// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/reasons.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/error.hpp>

/// @file
/// How ranks compare what they are about to do: in words, which they gather, or sum with zeros in the places of
/// the others. First they compare signatures. If these are equal and have counts, they compare tables.

namespace joinable { inline namespace v0 { namespace detail {

/// Why the signatures differ. `words` has as many words from each rank, in rank order, which begin with its
/// Descriptor::words().
[[nodiscard]] inline std::optional<AbortReason>
difference_of_signatures(int size, std::span<std::uint64_t const> words) {
    std::size_t const width = words.size() / static_cast<std::size_t>(size);
    return find_difference(size, [&](int rank) {
        return Descriptor::of_words(words.subspan(width * static_cast<std::size_t>(rank)));
    });
}

/// A rank's tables: what it sends to each rank, then what it expects from each.
[[nodiscard]] inline std::vector<std::uint64_t>
words_of_tables(PartSizes const& sends, PartSizes const& expects, int size) {
    auto const ranks = static_cast<std::size_t>(size);
    std::vector<std::uint64_t> words(2 * ranks);
    sends.copy_to(std::span{words}.first(ranks));
    expects.copy_to(std::span{words}.last(ranks));
    return words;
}
/// Why the tables differ. `words` has those of each rank, in rank order.
[[nodiscard]] inline std::optional<AbortReason>
difference_of_tables(Descriptor const& signature, int size, std::span<std::uint64_t const> words) {
    auto const word = [&](int rank, int place) {
        return words[static_cast<std::size_t>(2 * size * rank + place)];
    };
    return find_difference_of_counts(
        size,
        signature,
        [&](int from, int to) { return word(from, to); },
        [&](int from, int to) { return word(to, size + from); }
    );
}

}}} // namespace joinable::v0::detail
