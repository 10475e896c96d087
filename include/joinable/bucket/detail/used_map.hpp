// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace joinable { inline namespace v0 { namespace detail {

/// Tells which parameters some rank uses, and what ranks have of those that none uses. It has a word
/// per parameter; the owner of the map sums them over ranks. A word counts ranks with a backward
/// pass in three fields: those that use the parameter, those that do not and have a gradient of it,
/// and those that have none. Local.
class UsedMap {
public:
    explicit UsedMap(std::size_t parameters) : counts_(parameters) {}

    /// Clears all counts, including those of other ranks.
    void clear() noexcept {
        std::fill(counts_.begin(), counts_.end(), 0);
        is_known_ = false;
    }
    /// Records that this rank uses parameter `i`.
    void use(std::size_t i) noexcept { counts_[i] = user; }
    /// Records that this rank's pass does not use parameter `i`.
    void leave_out(std::size_t i, bool has_gradient) noexcept {
        counts_[i] = has_gradient ? holder : 1;
    }

    /// The counts to sum over all ranks.
    [[nodiscard]] std::span<std::uint64_t> words() noexcept { return counts_; }
    /// Called after the words have been summed.
    void set_known() noexcept { is_known_ = true; }
    [[nodiscard]] bool is_known() const noexcept { return is_known_; }

    /// Whether some rank uses parameter `i`; before the map is known, whether this rank does.
    [[nodiscard]] bool is_used(std::size_t i) const noexcept { return counts_[i] >= user; }
    /// Whether some rank ran a pass, and parameter `i` has no gradient on any rank that did.
    [[nodiscard]] bool is_absent(std::size_t i) const noexcept {
        return counts_[i] != 0 && counts_[i] < holder;
    }
    /// Whether no rank uses any parameter.
    [[nodiscard]] bool is_empty() const noexcept {
        return std::all_of(counts_.begin(), counts_.end(), [](auto word) { return word < user; });
    }

private:
    static constexpr std::uint64_t holder = std::uint64_t{1} << 21U; // a field counts 2^21 ranks
    static constexpr std::uint64_t user = std::uint64_t{1} << 42U;

    std::vector<std::uint64_t> counts_;
    bool is_known_ = false;
};

}}} // namespace joinable::v0::detail
