// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <new>
#include <span>
#include <type_traits>
#include <vector>

#include <joinable/communicator/shared_memory/board/arrival_line.hpp>
#include <joinable/communicator/shared_memory/board/first_reason.hpp>
#include <joinable/communicator/shared_memory/board/tuning.hpp>
#include <joinable/communicator/shared_memory/board/waiting.hpp>
#include <joinable/config.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// One rank's progress in its share of the chunks of a large collective. The rank resets it before
/// it arrives, when no rank uses the previous collective in that slot any more.
struct alignas(64) ChunkProgress {
    std::atomic<std::uint64_t> claimed{0}; ///< of its share, by any rank; may exceed it
    std::atomic<std::uint64_t> done{0};    ///< by this rank, of all shares; in slices: of its own
    std::atomic<std::uint64_t> lent{0};    ///< slices that it has copied to its ring so far
    std::atomic<bool> has_given_up{false}; ///< it copies no more slices

    void reset() noexcept;
};

/// The thread that computes for a rank: its own, in waits and tests, or a separate one.
enum class Worker : std::uint8_t { rank, helper };

/// The meeting place of one group's ranks. It does not know threads: ranks are numbers, and a rank
/// that waits or tests does the work. It lies in memory given to it, followed by its tables, and
/// holds no addresses. Ranks may therefore also be processes that share that memory.
class alignas(64) Board {
public:
    using Count = std::size_t;
    static constexpr std::size_t max_in_flight = 64; ///< collectives; a slot each

    /// @throws ContractViolation  `size` is below 1, or above the largest number in an arrival.
    static int checked(int size);

    /// The memory that create() needs.
    /// @throws ContractViolation  `size` is below 1, or above the largest number in an arrival.
    [[nodiscard]] static std::size_t bytes_for(int size) {
        return counts_at(checked(size)) + counts_per_arrival(size) * arrivals(size) * sizeof(Count);
    }
    /// The number of leading bytes that are used from the start. The rest is not touched before
    /// slot(), sends() or expects() are used.
    [[nodiscard]] static std::size_t bytes_at_start(int size) { return slots_at(checked(size)); }
    /// @pre `memory` is aligned for a Board, has bytes_for(size), and outlives the result, which
    /// need not be destroyed.
    static Board& create(int size, std::span<std::byte> memory);
    /// The board that another process created at `memory`.
    static Board& at_address(std::byte* memory) noexcept {
        return *std::launder(reinterpret_cast<Board*>(memory));
    }
    Board(Board const&) = delete;
    Board& operator=(Board const&) = delete;

    [[nodiscard]] int size() const noexcept { return size_; }

    /// An address as its distance from the board, for other ranks. The distance is the same in
    /// processes that map the memory at different addresses.
    [[nodiscard]] std::uint64_t place_of(void const* address) const noexcept {
        return reinterpret_cast<std::uintptr_t>(address) - reinterpret_cast<std::uintptr_t>(this);
    }
    [[nodiscard]] std::byte* place_at(std::uint64_t place) noexcept;

    [[nodiscard]] ArrivalLine& line(int rank, std::uint64_t sequence) noexcept {
        return lines()[arrival(rank, sequence)];
    }
    [[nodiscard]] ChunkProgress& progress(int rank, std::uint64_t sequence) noexcept;
    /// Room for a contribution of `rank` that is too long for its line but not for a slot.
    [[nodiscard]] std::byte* slot(int rank, std::uint64_t sequence) noexcept {
        return at(slots_at(size_)) + arrival(rank, sequence) * tuning::slot_bytes;
    }

    /// The tables of `rank` in a collective by counts: the elements that it sends to each rank,
    /// then those that it expects from each. Unused memory is never touched.
    [[nodiscard]] std::span<Count> sends(int rank, std::uint64_t sequence) noexcept {
        return counts_of(rank, sequence).first(width(size_));
    }
    [[nodiscard]] std::span<Count> expects(int rank, std::uint64_t sequence) noexcept {
        return counts_of(rank, sequence).last(width(size_));
    }

    [[nodiscard]] bool has_arrived(int rank, std::uint64_t sequence) noexcept;
    [[nodiscard]] std::vector<int> missing(std::uint64_t sequence);

    /// `rank` has finished all collectives before this number.
    [[nodiscard]] std::atomic<std::uint64_t>& retired(int rank) noexcept {
        return state_of(rank).retired;
    }
    /// Collectives before this number are no longer used for `rank`. Once that is so for all ranks,
    /// their slots are free for reuse. The order of the two steps matters: a helper that this does
    /// not see yet sees that its rank has retired the collective, and skips it (begin_helping).
    [[nodiscard]] std::uint64_t release(int rank) noexcept;

    /// The steady clock's time of the last keep_alive() of `rank`; 0 is never.
    [[nodiscard]] std::atomic<std::chrono::steady_clock::rep>& alive_at(int rank) noexcept {
        return state_of(rank).alive_at;
    }

    /// The ranks that have not finished a collective that must end before `sequence` can start.
    [[nodiscard]] std::vector<int> holding_up(std::uint64_t sequence);

    /// The first reason wins. Returns when nothing can arrive any more. Writers are numbered as
    /// FirstReason says; the numbers differ from ranks if this is the board of a subgroup. If the
    /// first writer dies, mark_dead() must be called for it: `before_sleep` does so where no other
    /// process does. If the first writer is stopped, this reason may become the one of all ranks.
    template <class BeforeSleep = SleepThrough>
    void
    abort(AbortReason const& reason, int writer, BeforeSleep const& before_sleep = {}) noexcept {
        reason_.give(reason, writer, [this] { freeze(); });
        room.wake(); // also those that wait for other things than this board's end
        reason_.await_given(room, reason, writer, [this] { freeze(); }, before_sleep);
    }
    /// Records that the writer with this number has died, anywhere, even in an abort. It had `rank`
    /// on this board; negative: none. `burier` is the writer that records the death, or
    /// FirstReason::nobody. The burier may itself die meanwhile and then be marked dead. Each rank
    /// that finds a writer dead may call this, so it may be called many times. Returns at once,
    /// although another writer may not have finished its own abort.
    void mark_dead(int rank, int number, AbortReason const& reason, int burier) noexcept;
    [[nodiscard]] bool is_dead(int rank) noexcept { return state_of(rank).is_dead.load(); }

    /// Between these calls a worker of `rank` may claim chunks of a collective.
    void begin_computing(int rank, Worker worker, std::uint64_t sequence) noexcept {
        computes(state_of(rank), worker).store(sequence);
    }
    void end_computing(int rank, Worker worker) noexcept {
        computes(state_of(rank), worker).store(nothing);
    }
    /// The same for a helper, which does not know which collectives its rank has finished. Returns
    /// whether the collective is still its rank's; if so, its slots stay unchanged until
    /// end_computing(). Call that even after false.
    [[nodiscard]] bool begin_helping(int rank, std::uint64_t sequence) noexcept {
        begin_computing(rank, Worker::helper, sequence);
        return retired(rank).load() <= sequence;
    }

    /// The ranks that may have claimed a chunk of a collective and not finished it.
    [[nodiscard]] std::vector<int> computing(std::uint64_t sequence);
    /// From now on no rank waits for a chunk of `rank`.
    void give_up_on(int rank) noexcept {
        state_of(rank).is_given_up.store(true);
        has_lost_.store(true);
        room.wake();
    }

    /// Records that another rank of this board waited for `rank` until its deadline.
    void set_overdue(int rank) noexcept { state_of(rank).is_overdue.store(true); }
    [[nodiscard]] bool is_overdue(int rank) noexcept { return state_of(rank).is_overdue.load(); }

    /// Whether some chunk of a collective will never be computed, because the rank that had claimed
    /// it died or was given up, and no other rank can still finish one. All ranks find the same.
    /// @pre all chunks are claimed
    [[nodiscard]] bool may_be_lost(std::uint64_t sequence) noexcept;

    /// Whether a rank is ending the board or has ended it. True on every rank that has failed
    /// because of that.
    [[nodiscard]] bool is_ending() const noexcept { return reason_.has_begun(); }
    /// True only if nothing can arrive any more; this does not change again.
    [[nodiscard]] bool is_aborted() const noexcept { return reason_.is_given(); }
    /// The writer that ends the board or has ended it. @pre is_ending()
    [[nodiscard]] int ended_by() const noexcept { return reason_.writer(); }
    /// @pre some line is frozen
    [[nodiscard]] AbortReason reason() const { return here(reason_.reason()); }

    /// How far the members of a rank's state reach, which differs between versions that have others.
    [[nodiscard]] static constexpr std::size_t state_bytes() noexcept {
        return offsetof(RankState, is_overdue) + sizeof(RankState::is_overdue);
    }

    /// See Communicator. Called before any rank but the caller knows the board.
    void renumber() noexcept { is_renumbered_ = true; }
    [[nodiscard]] bool is_renumbered() const noexcept { return is_renumbered_; }
    /// The reason as its ranks throw it.
    [[nodiscard]] AbortReason here(AbortReason reason) const {
        reason.is_renumbered = is_renumbered_;
        return reason;
    }

private:
    static constexpr std::uint64_t nothing = ~std::uint64_t{0};
    /// Its members are part of what ranks agree on: see state_bytes().
    struct alignas(64) RankState {
        std::atomic<std::uint64_t> retired{0};
        std::atomic<std::chrono::steady_clock::rep> alive_at{0};
        std::array<std::atomic<std::uint64_t>, 2> computes{nothing, nothing}; ///< per worker
        std::atomic<bool> is_dead{false};
        std::atomic<bool> is_given_up{false}; ///< stopped within a chunk at some rank's deadline
        std::atomic<bool> is_overdue{false};  ///< at some rank's deadline
    };

    [[nodiscard]] static std::atomic<std::uint64_t>&
    computes(RankState& state, Worker worker) noexcept {
        return state.computes[static_cast<std::size_t>(worker)];
    }

    [[nodiscard]] static bool may_compute(RankState const& state, std::uint64_t sequence) noexcept;

    void freeze() noexcept;

    explicit Board(int size) noexcept : room{size}, helpers_room{size}, size_{size} {}

    static constexpr std::size_t width(int size) noexcept { return static_cast<std::size_t>(size); }
    static constexpr std::size_t arrivals(int size) noexcept { return width(size) * max_in_flight; }
    static constexpr std::size_t counts_per_arrival(int size) noexcept { return 2 * width(size); }
    // The memory after the board has, for each rank: arrival lines, state, progress, slots, tables
    // of counts.
    static constexpr std::size_t lines_at() noexcept { return sizeof(Board); }
    static constexpr std::size_t ranks_at(int size) noexcept {
        return lines_at() + arrivals(size) * sizeof(ArrivalLine);
    }
    static constexpr std::size_t progress_at(int size) noexcept {
        return ranks_at(size) + width(size) * sizeof(RankState);
    }
    static constexpr std::size_t slots_at(int size) noexcept {
        return progress_at(size) + arrivals(size) * sizeof(ChunkProgress);
    }
    static constexpr std::size_t counts_at(int size) noexcept {
        return slots_at(size) + arrivals(size) * tuning::slot_bytes;
    }

    [[nodiscard]] std::byte* at(std::size_t offset) noexcept {
        return reinterpret_cast<std::byte*>(this) + offset;
    }
    [[nodiscard]] ArrivalLine* lines() noexcept {
        return std::launder(reinterpret_cast<ArrivalLine*>(at(lines_at())));
    }
    [[nodiscard]] RankState& state_of(int rank) noexcept {
        return std::launder(reinterpret_cast<RankState*>(at(ranks_at(size_))))[rank];
    }
    [[nodiscard]] static std::size_t arrival(int rank, std::uint64_t sequence) noexcept {
        return static_cast<std::size_t>(rank) * max_in_flight + sequence % max_in_flight;
    }
    [[nodiscard]] std::span<Count> counts_of(int rank, std::uint64_t sequence) noexcept;

public:
    WaitQueue room;
    WaitQueue helpers_room; ///< for threads that only wait for chunks to claim

private:
    int size_;
    bool is_renumbered_ = false;
    std::atomic<bool> has_lost_{false};
    FirstReason reason_;
};
static_assert(std::is_trivially_destructible_v<Board>);

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/shared_memory/board/impl/board.ipp>
#endif
