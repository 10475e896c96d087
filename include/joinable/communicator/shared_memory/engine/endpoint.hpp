// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/deadline.hpp>
#include <joinable/communicator/detail/reasons.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/shared_memory/board/board.hpp>
#include <joinable/communicator/shared_memory/engine/chunks.hpp>
#include <joinable/communicator/shared_memory/engine/lent_memory.hpp>
#include <joinable/communicator/shared_memory/engine/slices.hpp>
#include <joinable/config.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// One rank at a board. It posts its collectives and finishes them in any order.
///
/// Copies of a `Group` are the same group. It has these members:
/// - board()
/// - abort(reason, rank), which may abort more than the board.
/// - look_for_deaths(), which marks dead ranks where no other process does. It returns how long it
///   need not be called.
/// - reserve(), which is called before the rank uses memory of the board for the first time.
///
/// `Memory` is where the other ranks find this rank's buffers.
template <class Group, class Memory = OwnMemory>
class Endpoint {
public:
    Endpoint(Group group, int rank, Memory memory = {}) noexcept;
    Endpoint(Endpoint const&) = delete;
    Endpoint& operator=(Endpoint const&) = delete;

    [[nodiscard]] int rank() const noexcept { return rank_; }
    [[nodiscard]] int size() const noexcept { return board_.size(); }

    [[nodiscard]] std::chrono::nanoseconds deadline() const noexcept { return deadline_; }
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) noexcept {
        return std::exchange(deadline_, deadline);
    }

    void abort(AbortReason const& reason) { group_.abort(reason, rank_); }

    void keep_alive() noexcept {
        board_.alive_at(rank_).store(std::chrono::steady_clock::now().time_since_epoch().count());
    }

    /// The ranks that have not arrived in this rank's oldest unfinished collective.
    [[nodiscard]] std::vector<int> missing_ranks() const {
        return retired_ == next_ ? std::vector<int>{} : board_.missing(retired_);
    }

    [[nodiscard]] Memory& memory() noexcept { return memory_; }

    /// Arrives in the next collective and returns its number.
    std::uint64_t post(Request const& request);

    [[nodiscard]] bool is_done(std::uint64_t sequence) const noexcept {
        return sequence < retired_ || pending_[sequence % Board::max_in_flight].is_done;
    }

    /// Makes progress. Returns whether this rank's buffers are final.
    /// @throws TimedOut  after aborting the group: polling reached the deadline, and ranks are
    ///                   missing.
    [[nodiscard]] bool test(std::uint64_t sequence);

    /// Makes progress, by at most this rank's own share if that is not computed yet. A rank that
    /// tests during other work thus does no more than the others. Also advances others. Returns
    /// whether its buffers are final.
    [[nodiscard]] bool progress(std::uint64_t sequence);
    /// Moves slices of this rank's collectives `but` one: other ranks may wait for them.
    void advance_others(std::uint64_t but = ~std::uint64_t{0}) noexcept;

    /// Makes progress, by up to that many shares. Returns whether this rank's buffers are final.
    [[nodiscard]] bool try_finish(std::uint64_t sequence, int shares);

    void finish(std::uint64_t sequence);

    /// Waits until `ready()` or until the deadline. The deadline starts again when a rank for which
    /// this one waits calls keep_alive(). `holding_up()` lists those ranks. If it is empty at the
    /// deadline, the wait returns although `ready()` is false.
    /// @throws TimedOut  after aborting the group: they "did not <do>", while this rank `does()`.
    template <class Ready, class HoldingUp, class Does>
    void wait_for_others(
        Ready const& ready, HoldingUp const& holding_up, char const* to_do, Does const& does
    );
    /// The same for a rank that tests instead of waiting, and has just found that it is not ready.
    /// Returns whether the group was aborted because of that.
    template <class HoldingUp, class Does>
    [[nodiscard]] bool has_polled_too_long(
        WaitClock& polled, HoldingUp const& holding_up, char const* to_do, Does const& does
    );

    /// Waits for `ready()` until the deadline; returns whether it came true. Meanwhile this rank's
    /// other collectives make progress. The deadline starts again whenever one of them does.
    template <class Ready>
    bool wait(Ready const& ready, std::chrono::nanoseconds deadline);

private:
    struct Pending {
        Descriptor signature;
        void* out = nullptr;
        bool is_small = false;   ///< every rank combines it by itself
        bool is_on_line = false; ///< it fits on the arrival line and needs no slot
        bool is_sliced = false;  ///< else in chunks
        bool is_done = false;
        bool has_agreed = false;
        bool is_refused = false; ///< the ranks' calls differ: nothing to compute
        Cut cut = {};
        Pipeline pipeline = {};
        WaitClock polled = {};
    };
    enum class Arrival : std::uint8_t { waiting, complete, never };

    [[nodiscard]] Pending& pending_of(std::uint64_t sequence) noexcept {
        return pending_[sequence % Board::max_in_flight];
    }

    /// Keeps in `overdue` the ranks that have not called keep_alive() for a deadline. Returns how much
    /// longer to wait for the others.
    [[nodiscard]] std::chrono::nanoseconds take_overdue(std::vector<int>& overdue) const;
    /// Called before this rank writes to its slot or table at this position of the board.
    void reserve_once(
        std::uint64_t& reserved, std::uint64_t sequence, void const* data, std::size_t bytes
    );
    /// Gives up on ranks that have not finished a chunk at the deadline: their processes have been
    /// stopped.
    void give_up_on_computing(std::uint64_t sequence);
    /// Throws the group's reason, because the collective will never be complete.
    [[noreturn]] void throw_lost(std::uint64_t sequence);
    /// Waits until the pipeline can advance, or never will.
    void wait_for_slices(std::uint64_t sequence);
    /// The ranks to name at the deadline. Empty if this rank can go on by now, or the group has failed.
    [[nodiscard]] std::vector<int> holding_up_slices(std::uint64_t sequence);
    /// At the deadline of a group that had failed before. Other sums of slices are then given up without another wait.
    [[noreturn]] void give_up_on_slices(std::uint64_t sequence);
    [[nodiscard]] bool has_given_up(std::uint64_t sequence) noexcept {
        return board_.progress(rank_, sequence).has_given_up.load();
    }
    void give_up(std::uint64_t sequence) noexcept;

    /// The slot of the next collective, which is `signature`, is free when every rank has finished the collective that
    /// used it before.
    void make_room(Descriptor const& signature);

    /// The first collective of this rank in which it can compute. If there is none, the next
    /// number.
    [[nodiscard]] std::uint64_t find_other() noexcept {
        std::uint64_t other = retired_;
        while (other != next_ && !can_compute(other)) {
            ++other;
        }
        return other;
    }
    [[nodiscard]] bool can_compute(std::uint64_t sequence) noexcept;
    /// Whether this rank can copy or compute slices.
    [[nodiscard]] bool has_slices(std::uint64_t sequence) noexcept;
    void advance_other(std::uint64_t sequence) noexcept;
    [[nodiscard]] bool has_own_share(std::uint64_t sequence, Pending const& pending) noexcept {
        return !pending.is_small && has_unclaimed(board_, sequence, pending.cut, rank_);
    }
    [[nodiscard]] Arrival arrival_of(std::uint64_t sequence) noexcept;

    void retire() noexcept;

    /// @pre board_.reason() is known
    [[noreturn]] void throw_reason(Descriptor const& signature) const {
        throw_failure(in_words_of(rank_, signature.text(), board_.reason()));
    }
    void
    abort_for(std::vector<int> const& overdue, char const* to_do, std::string const& meanwhile) {
        for (int const rank : overdue) { // before the abort: a rank that sees it asks for them
            board_.set_overdue(rank);
        }
        group_.abort(reason_of_delay(overdue, to_do, deadline_, rank_, meanwhile), rank_);
    }

    Group group_;
    Board& board_;
    int rank_;
    Memory memory_;
    std::chrono::nanoseconds deadline_ = default_deadline;
    bool is_patience_over_ = false; ///< after an abort: a wait for slices reached the deadline
    std::uint64_t next_ = 0;        ///< sequence number of the next collective
    std::uint64_t retired_ = 0;     ///< this rank has finished all before
    std::uint64_t all_retired_ = 0; ///< all ranks have, as far as known
    static_assert(Board::max_in_flight == 64, "a bit for each");
    std::uint64_t slots_ = 0;  ///< of this rank that have memory
    std::uint64_t counts_ = 0; ///< tables that have memory
    std::array<Pending, Board::max_in_flight> pending_{};
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/shared_memory/engine/impl/endpoint.ipp>
#endif
