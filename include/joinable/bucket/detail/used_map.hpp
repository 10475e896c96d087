// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <joinable/tensor/buffer.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Tells which parameters some rank uses. It has one count per parameter; the owner of the map sums
/// them over ranks. Local.
class UsedMap {
public:
    explicit UsedMap(std::size_t parameters) : counts_(parameters) {}

    /// Clears all counts, including those of other ranks.
    void clear() noexcept {
        std::fill(counts_.begin(), counts_.end(), 0);
        is_known_ = false;
    }
    /// Records that this rank uses parameter `i`.
    void use(std::size_t i) noexcept { counts_[i] = 1; }

    /// The counts to sum over all ranks.
    [[nodiscard]] Buffer buffer() noexcept { return {counts_.data(), counts_.size(), DType::i32}; }
    /// Called after the buffer has been summed.
    void set_known() noexcept { is_known_ = true; }
    [[nodiscard]] bool is_known() const noexcept { return is_known_; }

    /// Whether some rank uses parameter `i`; before the map is known, whether this rank does.
    [[nodiscard]] bool is_used(std::size_t i) const noexcept { return counts_[i] != 0; }
    [[nodiscard]] bool is_empty() const noexcept {
        return std::all_of(counts_.begin(), counts_.end(), [](auto count) { return count == 0; });
    }

private:
    std::vector<std::int32_t> counts_;
    bool is_known_ = false;
};

}}} // namespace joinable::v0::detail
