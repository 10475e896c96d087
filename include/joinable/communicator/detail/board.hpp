// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/waiting.hpp>
#include <joinable/detail/text.hpp>

namespace joinable::inline v0::detail {

enum class Collective : std::uint8_t { all_reduce, broadcast, barrier, all_gather, reduce_scatter };

[[nodiscard]] constexpr std::string_view name_of(Collective collective) noexcept {
    constexpr std::string_view names[] = {
        "all_reduce", "broadcast", "barrier", "all_gather", "reduce_scatter"
    };
    return names[static_cast<std::size_t>(collective)];
}

/// What a rank says that it is about to do; all ranks must say the same.
struct Descriptor {
    Collective collective = Collective::barrier;
    DType dtype = DType::u8;
    ReduceOp op = ReduceOp::sum;
    int root = 0;
    std::size_t count = 0;

    friend bool operator==(Descriptor const&, Descriptor const&) = default;

    [[nodiscard]] std::string text() const {
        std::string said = concat(name_of(collective));
        if (collective != Collective::barrier) {
            said += concat(" of ", count, " ", joinable::name_of(dtype));
        }
        if (collective == Collective::all_reduce || collective == Collective::reduce_scatter) {
            said += concat(" with ", joinable::name_of(op));
        }
        if (collective == Collective::broadcast) {
            said += concat(" from rank ", root);
        }
        return said;
    }
};

/// One rank's arrival in one collective, on one cache line: a small message needs no other.
///
/// `word` holds, from the top: frozen (1 bit), root (14), descriptor (11), inline count (7: 0 means
/// that payload holds count and addresses instead), sequence number (31).
/// Arriving is one compare-and-swap on it, aborting sets the frozen bit: so whether a rank has
/// arrived before an abort is decided in one step, and every rank sees the same.
struct alignas(64) ArrivalLine {
    std::atomic<std::uint64_t> word{empty};
    std::array<std::uint64_t, 7> payload{};

    static constexpr std::size_t inline_bytes = 56;
    static constexpr std::uint64_t frozen = std::uint64_t{1} << 63U;
    static constexpr std::uint64_t sequence_mask = (std::uint64_t{1} << 31U) - 1;
    static constexpr std::uint64_t empty = sequence_mask; ///< no collective of a fresh ring slot

    static std::uint64_t
    encode(std::uint64_t sequence, Descriptor const& said, bool is_inline) noexcept {
        std::uint64_t const inline_count = is_inline ? said.count + 1 : 0;
        return (sequence & sequence_mask) | inline_count << 31U |
               static_cast<std::uint64_t>(said.collective) << 38U |
               static_cast<std::uint64_t>(said.dtype) << 42U |
               static_cast<std::uint64_t>(said.op) << 46U |
               static_cast<std::uint64_t>(said.root) << 49U;
    }
    [[nodiscard]] static Descriptor
    decode(std::uint64_t word, std::array<std::uint64_t, 7> const& payload) noexcept {
        std::uint64_t const inline_count = word >> 31U & 0x7fU;
        return {
            static_cast<Collective>(word >> 38U & 0xfU),
            static_cast<DType>(word >> 42U & 0xfU),
            static_cast<ReduceOp>(word >> 46U & 0x7U),
            static_cast<int>(word >> 49U & 0x3fffU),
            static_cast<std::size_t>(inline_count != 0 ? inline_count - 1 : payload[0])
        };
    }
};

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
    static constexpr std::size_t slots = 64; ///< collectives in flight

    explicit Board(int size)
        : size_{size}, lines_(static_cast<std::size_t>(size) * slots),
          retired_(static_cast<std::size_t>(size)), room{size} {}

    [[nodiscard]] int size() const noexcept { return size_; }

    [[nodiscard]] ArrivalLine& line(int rank, std::uint64_t sequence) noexcept {
        return lines_[static_cast<std::size_t>(rank) * slots + sequence % slots];
    }
    [[nodiscard]] ChunkProgress& progress(std::uint64_t sequence) noexcept {
        return progress_[sequence % slots];
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
        return retired_[static_cast<std::size_t>(rank)].count;
    }

    /// The ranks that have not finished the collective before which `sequence` cannot start.
    [[nodiscard]] std::vector<int> holding_up(std::uint64_t sequence) {
        std::vector<int> ranks;
        for (int rank = 0; rank < size_; ++rank) {
            if (retired(rank).load() + slots <= sequence) {
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
    struct alignas(64) Retired {
        std::atomic<std::uint64_t> count{0};
    };

    int size_;
    std::vector<ArrivalLine> lines_;
    std::vector<Retired> retired_;
    std::array<ChunkProgress, slots> progress_;
    std::atomic<int> state_{open};
    AbortReason reason_;

public:
    WaitingRoom room;
};

} // namespace joinable::inline v0::detail
