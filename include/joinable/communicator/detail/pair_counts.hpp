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

namespace joinable { inline namespace v0 { namespace detail {

/// Whether each rank has only its own part of the table of counts.
[[nodiscard]] constexpr bool has_pairs(Descriptor const& said) noexcept {
    return said.has_counts && said.collective == Collective::all_to_all;
}
/// Whether ranks must be told the counts of others before they can pass data on.
[[nodiscard]] constexpr bool tells_parts(Descriptor const& said) noexcept {
    return has_pairs(said) || (said.has_counts && (said.collective == Collective::gather ||
                                                   said.collective == Collective::scatter));
}

/// What each rank sends to each and expects from each, in words that ranks sum when they have found that they all
/// run the same. All then find the same difference, or none.
class PairCounts {
public:
    PairCounts() = default;
    PairCounts(PartSizes const& sends, PartSizes const& expects, int rank, int size)
        : size_{static_cast<std::size_t>(size)}, words_(2 * size_ * size_) {
        std::span<std::uint64_t> const words{words_};
        std::size_t const row = static_cast<std::size_t>(rank) * size_;
        sends.copy_to(words.subspan(row, size_));
        expects.copy_to(words.subspan(words.size() / 2 + row, size_));
    }

    [[nodiscard]] std::span<std::uint64_t> words() noexcept { return words_; }
    [[nodiscard]] std::optional<AbortReason> difference(Descriptor const& said) const {
        return find_difference_of_counts(
            static_cast<int>(size_),
            said,
            [&](int from, int to) { return word(from, to); },
            [&](int from, int to) { return word(static_cast<int>(size_) + to, from); }
        );
    }
    /// Those of all ranks, as a Substitute takes them.
    [[nodiscard]] std::vector<std::size_t> known(Descriptor const& said) const {
        if (said.collective == Collective::all_to_all) {
            return {words_.data(), words_.data() + words_.size() / 2};
        }
        std::vector<std::size_t> parts;
        for (int rank = 0; rank < static_cast<int>(size_); ++rank) {
            bool const collects = said.collective == Collective::gather;
            parts.push_back(collects ? word(rank, said.root) : word(said.root, rank));
        }
        return parts;
    }

private:
    [[nodiscard]] std::uint64_t word(int row, int column) const {
        return words_[static_cast<std::size_t>(row) * size_ + static_cast<std::size_t>(column)];
    }

    std::size_t size_ = 0;
    std::vector<std::uint64_t> words_;
};

}}} // namespace joinable::v0::detail
