// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <joinable/communicator/arena.hpp>

namespace joinable::inline v0::detail {

/// How many collectives each rank has posted, in memory that all ranks have: so whoever waits can
/// tell for whom. Without such memory nothing is known.
class NcclArrivals {
public:
    static constexpr std::size_t line_bytes = 64; ///< a rank's own cache line

    NcclArrivals() = default;
    /// `memory` is empty, or has a line for each rank.
    explicit NcclArrivals(Arena memory) noexcept : memory_{std::move(memory)} {}

    [[nodiscard]] bool is_known() const noexcept { return memory_.data() != nullptr; }
    void arrive(int rank, std::uint64_t number) const noexcept {
        if (is_known()) {
            count_of(rank).store(number, std::memory_order_release);
        }
    }
    /// Of `size` ranks, those that have posted fewer.
    [[nodiscard]] std::vector<int> missing(int size, std::uint64_t number) const {
        std::vector<int> ranks;
        for (int rank = 0; is_known() && rank < size; ++rank) {
            if (count_of(rank).load(std::memory_order_acquire) < number) {
                ranks.push_back(rank);
            }
        }
        return ranks;
    }

private:
    [[nodiscard]] std::atomic_ref<std::uint64_t> count_of(int rank) const noexcept {
        std::byte* const line = memory_.data() + static_cast<std::size_t>(rank) * line_bytes;
        return std::atomic_ref<std::uint64_t>{*reinterpret_cast<std::uint64_t*>(line)};
    }

    Arena memory_;
};

} // namespace joinable::inline v0::detail
