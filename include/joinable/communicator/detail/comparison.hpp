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

/// Whether ranks must be told the counts of others before they can pass data on.
[[nodiscard]] constexpr bool tells_parts(Descriptor const& signature) noexcept {
    return signature.has_counts && (signature.collective == Collective::gather ||
                                    signature.collective == Collective::scatter ||
                                    signature.collective == Collective::all_to_all);
}

/// The tables of all ranks, in words that ranks sum when they have found that they all run the same. All then find
/// the same difference, or none.
class PairCounts {
public:
    PairCounts() = default;
    PairCounts(Request const& request, int rank, int size)
        : signature_{request.signature}, size_{size} {
        for (int from = 0; from < size; ++from) {
            for (int to = 0; to < size; ++to) {
                if (has_part(from, to)) {
                    words_.push_back(from == rank ? request.sends[to] : 0);
                    words_.push_back(to == rank ? request.expects[from] : 0);
                }
            }
        }
    }

    [[nodiscard]] std::span<std::uint64_t> words() noexcept { return words_; }
    [[nodiscard]] std::optional<AbortReason> difference() const {
        auto const word = [&](int from, int to, int side) -> std::uint64_t {
            int const pair = signature_.collective == Collective::gather    ? from
                             : signature_.collective == Collective::scatter ? to
                                                                            : size_ * from + to;
            return has_part(from, to) ? words_[static_cast<std::size_t>(2 * pair + side)] : 0;
        };
        return find_difference_of_counts(
            size_,
            signature_,
            [&](int from, int to) { return word(from, to, 0); },
            [&](int from, int to) { return word(from, to, 1); }
        );
    }
    /// The counts of all ranks, as a Substitute takes them.
    [[nodiscard]] std::vector<std::size_t> known() const {
        std::vector<std::size_t> counts;
        for (std::size_t pair = 0; pair < words_.size(); pair += 2) {
            counts.push_back(words_[pair]);
        }
        return counts;
    }

private:
    /// Only the root has parts for others in a scatter, or gets some in a gather.
    [[nodiscard]] bool has_part(int from, int to) const noexcept {
        return signature_.collective == Collective::gather    ? to == signature_.root
               : signature_.collective == Collective::scatter ? from == signature_.root
                                                              : true;
    }

    Descriptor signature_;
    int size_ = 0;
    std::vector<std::uint64_t> words_;
};

}}} // namespace joinable::v0::detail
