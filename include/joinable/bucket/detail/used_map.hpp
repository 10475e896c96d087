// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <joinable/tensor/buffer.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Which parameters some rank uses: one count per parameter, which the owner of the map
/// sums over ranks. Local.
class UsedMap {
public:
    explicit UsedMap(std::size_t parameters) : counts_(parameters) {}

    /// Forgets everything, what other ranks said included.
    void clear() noexcept {
        std::fill(counts_.begin(), counts_.end(), 0);
        is_known_ = false;
    }
    /// This rank uses parameter `i`.
    void use(std::size_t i) noexcept { counts_[i] = 1; }

    /// What is to be summed over all ranks.
    [[nodiscard]] Buffer buffer() noexcept { return {counts_.data(), counts_.size(), DType::i32}; }
    /// The buffer has been summed.
    void set_known() noexcept { is_known_ = true; }
    [[nodiscard]] bool is_known() const noexcept { return is_known_; }

    /// Whether some rank uses parameter `i`; of this rank alone before the map is known.
    [[nodiscard]] bool is_used(std::size_t i) const noexcept { return counts_[i] != 0; }
    [[nodiscard]] bool is_empty() const noexcept {
        return std::all_of(counts_.begin(), counts_.end(), [](auto count) { return count == 0; });
    }

private:
    std::vector<std::int32_t> counts_;
    bool is_known_ = false;
};

}}} // namespace joinable::v0::detail
