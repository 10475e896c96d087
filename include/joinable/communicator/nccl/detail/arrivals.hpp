// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <joinable/device/arena.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// How many collectives each rank has posted, and when it said last that it is at work, in memory that
/// all ranks have: so whoever waits can tell for whom, and for how long. Without such memory nothing is
/// known.
class NcclArrivals {
public:
    using Clock = std::chrono::steady_clock;
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
    void keep_alive(int rank) const noexcept {
        if (is_known()) {
            alive_at_of(rank).store(
                static_cast<std::uint64_t>(Clock::now().time_since_epoch().count()),
                std::memory_order_release
            );
        }
    }
    /// When a rank said so last: one clock for all processes of a machine. Long ago, if never.
    [[nodiscard]] Clock::time_point alive_at(int rank) const noexcept {
        return !is_known()
                   ? Clock::time_point{}
                   : Clock::time_point{Clock::duration{
                         static_cast<Clock::rep>(alive_at_of(rank).load(std::memory_order_acquire))
                     }};
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
    [[nodiscard]] std::uint64_t* line_of(int rank) const noexcept {
        std::byte* const line = memory_.data() + static_cast<std::size_t>(rank) * line_bytes;
        return reinterpret_cast<std::uint64_t*>(line);
    }
    [[nodiscard]] std::atomic_ref<std::uint64_t> count_of(int rank) const noexcept {
        return std::atomic_ref<std::uint64_t>{line_of(rank)[0]};
    }
    [[nodiscard]] std::atomic_ref<std::uint64_t> alive_at_of(int rank) const noexcept {
        return std::atomic_ref<std::uint64_t>{line_of(rank)[1]};
    }

    Arena memory_;
};

}}} // namespace joinable::v0::detail
