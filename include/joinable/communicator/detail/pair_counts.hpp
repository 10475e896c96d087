// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <joinable/communicator/detail/comparison.hpp>
#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Whether each rank has only its own part of the table of counts.
[[nodiscard]] constexpr bool has_pairs(Descriptor const& signature) noexcept {
    return signature.has_counts && signature.collective == Collective::all_to_all;
}
/// Whether ranks must be told the counts of others before they can pass data on.
[[nodiscard]] constexpr bool tells_parts(Descriptor const& signature) noexcept {
    return has_pairs(signature) ||
           (signature.has_counts && (signature.collective == Collective::gather ||
                                     signature.collective == Collective::scatter));
}

/// The tables of all ranks, in words that ranks sum when they have found that they all run the same. All then find
/// the same difference, or none.
class PairCounts {
public:
    PairCounts() = default;
    PairCounts(PartSizes const& sends, PartSizes const& expects, int rank, int size)
        : size_{size}, words_(2 * static_cast<std::size_t>(size) * static_cast<std::size_t>(size)) {
        auto const own = words_of_tables(sends, expects, size);
        std::copy(
            own.begin(), own.end(), words_.data() + own.size() * static_cast<std::size_t>(rank)
        );
    }

    [[nodiscard]] std::span<std::uint64_t> words() noexcept { return words_; }
    [[nodiscard]] std::optional<AbortReason> difference(Descriptor const& signature) const {
        return difference_of_tables(signature, size_, words_);
    }
    /// The counts of all ranks, as a Substitute takes them.
    [[nodiscard]] std::vector<std::size_t> known(Descriptor const& signature) const {
        bool const sends = signature.collective == Collective::scatter;
        bool const collects = signature.collective == Collective::gather;
        std::vector<std::size_t> counts;
        for (int from = sends ? signature.root : 0; from < (sends ? signature.root + 1 : size_);
             ++from) {
            for (int to = collects ? signature.root : 0;
                 to < (collects ? signature.root + 1 : size_);
                 ++to) {
                counts.push_back(words_[static_cast<std::size_t>(2 * size_ * from + to)]);
            }
        }
        return counts;
    }

private:
    int size_ = 0;
    std::vector<std::uint64_t> words_;
};

}}} // namespace joinable::v0::detail
