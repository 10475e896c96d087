// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/waiting.hpp>

namespace joinable::inline v0::detail {

/// How far the ranks have come with the chunks of one large collective. The upper bits of each word
/// are the sequence number, so that whoever posts first resets the slot: enough of them that no
/// number comes back, however long only small messages have used the slot.
struct alignas(64) ChunkProgress {
    std::atomic<std::uint64_t> claimed{~std::uint64_t{0}};
    std::atomic<std::uint64_t> done{~std::uint64_t{0}};

    static constexpr unsigned count_bits = 24;
    static constexpr std::uint64_t count_mask = (std::uint64_t{1} << count_bits) - 1;

    void reset(std::uint64_t sequence) noexcept {
        for (std::atomic<std::uint64_t>* const counter : {&claimed, &done}) {
            std::uint64_t old = counter->load();
            std::uint64_t const fresh = sequence << count_bits;
            if ((old & ~count_mask) != fresh) {
                counter->compare_exchange_strong(old, fresh);
            }
        }
    }
};

/// Where the ranks of one group meet. Knows no threads: ranks are numbers, and whoever waits or
/// tests does the work.
class Board {
public:
    static constexpr std::size_t max_in_flight = 64; ///< collectives; a slot each

    /// @throws ContractViolation  `size` is below 1, or above what an arrival can name.
    explicit Board(int size)
        : size_{checked(size)}, lines_(width() * max_in_flight), ranks_(width()),
          counts_{
              std::make_unique_for_overwrite<std::size_t[]>(2 * width() * width() * max_in_flight)
          },
          room{size} {}

    [[nodiscard]] int size() const noexcept { return size_; }

    [[nodiscard]] ArrivalLine& line(int rank, std::uint64_t sequence) noexcept {
        return lines_[static_cast<std::size_t>(rank) * max_in_flight + sequence % max_in_flight];
    }
    [[nodiscard]] ChunkProgress& progress(std::uint64_t sequence) noexcept {
        return progress_[sequence % max_in_flight];
    }

    /// What `rank` says in a collective by counts: the elements that it sends to each rank, then
    /// those that it expects from each. Memory that nothing uses is never touched.
    [[nodiscard]] std::span<std::size_t> sends(int rank, std::uint64_t sequence) noexcept {
        return counts_of(rank, sequence).first(width());
    }
    [[nodiscard]] std::span<std::size_t> expects(int rank, std::uint64_t sequence) noexcept {
        return counts_of(rank, sequence).last(width());
    }

    [[nodiscard]] bool has_arrived(int rank, std::uint64_t sequence) noexcept {
        return (line(rank, sequence).word.load() & ArrivalLine::sequence_mask) ==
               (sequence & ArrivalLine::sequence_mask);
    }
    [[nodiscard]] std::vector<int> missing(std::uint64_t sequence) {
        std::vector<int> ranks;
        for (int rank = 0; rank < size_; ++rank) {
            if (!has_arrived(rank, sequence)) {
                ranks.push_back(rank);
            }
        }
        return ranks;
    }

    /// Collectives before this number are finished on `rank`: their slots are free for others.
    [[nodiscard]] std::atomic<std::uint64_t>& retired(int rank) noexcept {
        return ranks_[static_cast<std::size_t>(rank)].retired;
    }

    /// When `rank` last said that it is at work, as the steady clock counts; 0 is never.
    [[nodiscard]] std::atomic<std::chrono::steady_clock::rep>& alive_at(int rank) noexcept {
        return ranks_[static_cast<std::size_t>(rank)].alive_at;
    }

    /// The ranks that have not finished the collective before which `sequence` cannot start.
    [[nodiscard]] std::vector<int> holding_up(std::uint64_t sequence) {
        std::vector<int> ranks;
        for (int rank = 0; rank < size_; ++rank) {
            if (retired(rank).load() + max_in_flight <= sequence) {
                ranks.push_back(rank);
            }
        }
        return ranks;
    }

    /// The first writer wins. Returns when nothing can arrive any more.
    void abort(AbortReason reason) {
        int expected = open;
        if (state_.compare_exchange_strong(expected, writing)) {
            reason_ = std::move(reason);
            state_.store(written);
            for (ArrivalLine& arrival : lines_) {
                arrival.word.fetch_or(ArrivalLine::frozen);
            }
            state_.store(closed);
            room.wake();
        } else {
            while (state_.load() != closed) {
                cpu_relax();
            }
        }
    }
    /// True only when nothing can arrive any more: whoever sees it can rely on it.
    [[nodiscard]] bool is_spent() const noexcept { return state_.load() == closed; }
    /// @pre some line is frozen
    [[nodiscard]] AbortReason const& reason() const noexcept { return reason_; }

private:
    enum : int { open, writing, written, closed };
    struct alignas(64) RankState {
        std::atomic<std::uint64_t> retired{0};
        std::atomic<std::chrono::steady_clock::rep> alive_at{0};
    };

    [[nodiscard]] std::size_t width() const noexcept { return static_cast<std::size_t>(size_); }
    [[nodiscard]] std::span<std::size_t> counts_of(int rank, std::uint64_t sequence) noexcept {
        std::size_t const at =
            static_cast<std::size_t>(rank) * max_in_flight + sequence % max_in_flight;
        return {counts_.get() + at * 2 * width(), 2 * width()};
    }
    static int checked(int size) {
        if (size < 1 || size > ArrivalLine::max_ranks) {
            throw ContractViolation{concat(
                "a group needs between 1 and ",
                ArrivalLine::max_ranks,
                " ranks, but was given ",
                size
            )};
        }
        return size;
    }

    int size_;
    std::vector<ArrivalLine> lines_;
    std::vector<RankState> ranks_;
    std::unique_ptr<std::size_t[]> counts_;
    std::array<ChunkProgress, max_in_flight> progress_;
    std::atomic<int> state_{open};
    AbortReason reason_;

public:
    WaitingRoom room;
};

} // namespace joinable::inline v0::detail
