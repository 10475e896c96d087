// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/board.hpp>
#include <joinable/communicator/detail/exchange.hpp>
#include <joinable/communicator/detail/reduce.hpp>
#include <joinable/detail/failure.hpp>

namespace joinable::inline v0 {

class ThreadCommunicator;

/// A collective between thread ranks. Destroyed unfinished it waits up to the deadline; while
/// unwinding it aborts. When it is gone, no other rank touches this rank's buffers any more.
class [[nodiscard("destroying the work waits for it: wait() where it is needed")]] ThreadWork {
public:
    ThreadWork(ThreadWork&& other) noexcept
        : comm_{std::exchange(other.comm_, nullptr)}, sequence_{other.sequence_},
          exceptions_{other.exceptions_} {}
    ThreadWork& operator=(ThreadWork&&) = delete;
    inline ~ThreadWork();

    /// Blocks until this rank's buffers are final. Waiting again returns at once.
    /// @throws Mismatch  ranks said different things; no data moved.
    /// @throws TimedOut, PeerFailed, ...  what the communicator was aborted with, unless every rank
    ///         had arrived before.
    inline void wait();
    /// Makes progress; true once wait() would return at once. @throws as wait() does.
    [[nodiscard]] inline bool test();

private:
    friend class ThreadCommunicator;
    ThreadWork(ThreadCommunicator& comm, std::uint64_t sequence) noexcept
        : comm_{&comm}, sequence_{sequence} {}

    ThreadCommunicator* comm_;
    std::uint64_t sequence_;
    int exceptions_ = std::uncaught_exceptions();
};

/// Ranks are threads of this process: made by run_threads(), one object per rank.
///
/// Reductions combine every element in rank order, so results are the same bit for bit whoever
/// arrives first. Collectives are asynchronous: whoever waits or tests does the work for all, so a
/// rank that computes holds up nobody. Up to 64 are in flight, further ones finish the oldest.
/// Ranks compare what they are about to do in every collective. No allocation, no lock and no
/// system call unless a rank waits long.
class ThreadCommunicator {
public:
    /// For run_threads; `board` outlives the communicator.
    ThreadCommunicator(detail::Board& board, int rank) noexcept : board_{board}, rank_{rank} {}
    ThreadCommunicator(ThreadCommunicator const&) = delete;
    ThreadCommunicator& operator=(ThreadCommunicator const&) = delete;

    [[nodiscard]] int rank() const noexcept { return rank_; }
    [[nodiscard]] int size() const noexcept { return board_.size(); }

    /// In place. @throws ContractViolation  a bit operation on floating-point elements.
    ThreadWork all_reduce(Buffer buffer, ReduceOp op) {
        detail::check_memory(buffer);
        detail::check_reduction(buffer, op);
        return post(
            {detail::Collective::all_reduce, buffer.dtype, op, 0, buffer.count},
            buffer.data,
            buffer.data
        );
    }

    /// @throws ContractViolation  `root` is no rank.
    ThreadWork broadcast(Buffer buffer, int root) {
        detail::check_memory(buffer);
        detail::check_root(root, size());
        return post(
            {detail::Collective::broadcast, buffer.dtype, ReduceOp::sum, root, buffer.count},
            buffer.data,
            buffer.data
        );
    }

    void barrier() {
        post({detail::Collective::barrier, DType::u8, ReduceOp::sum, 0, 0}, nullptr, nullptr)
            .wait();
    }

    /// `out` is `size()` times `in`; `in` may be this rank's part of `out`.
    /// @throws ContractViolation  counts or dtypes do not fit.
    ThreadWork all_gather(ConstBuffer in, Buffer out) {
        detail::check_share(in, out, size());
        return post(
            {detail::Collective::all_gather, in.dtype, ReduceOp::sum, 0, in.count},
            in.data,
            out.data
        );
    }

    /// `in` is `size()` times `out`; they do not overlap.
    /// @throws ContractViolation  counts or dtypes do not fit, or a bit operation on floats.
    ThreadWork reduce_scatter(ConstBuffer in, Buffer out, ReduceOp op) {
        detail::check_share(out, in, size());
        detail::check_reduction(in, op);
        return post(
            {detail::Collective::reduce_scatter, in.dtype, op, 0, out.count}, in.data, out.data
        );
    }

    /// Local. The first reason wins; every wait that cannot complete any more throws it.
    void abort(AbortReason const& reason) { board_.abort(reason); }
    [[nodiscard]] bool is_spent() const noexcept { return board_.is_spent(); }

    /// Local; for waits that start later. Returns the deadline that was in force.
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) noexcept {
        return std::exchange(deadline_, deadline);
    }

    /// Local. Who has not arrived in this rank's oldest unfinished collective.
    [[nodiscard]] std::vector<int> missing() const {
        return retired_ == next_ ? std::vector<int>{} : board_.missing(retired_);
    }

private:
    friend class ThreadWork;

    struct Pending {
        detail::Descriptor said;
        void* out = nullptr;
        bool is_inline = false;
        bool is_done = false;
    };
    // -- posting ---------------------------------------------------------------------------------

    ThreadWork post(detail::Descriptor const& said, void const* in, void* out) {
        make_room();
        std::uint64_t const sequence = next_;
        Pending& pending = pending_[sequence % detail::Board::slots];
        std::size_t const bytes = said.count * size_of(said.dtype);
        bool const fits = bytes <= detail::ArrivalLine::inline_bytes &&
                          said.collective <= detail::Collective::barrier;
        pending = {said, out, fits, false};
        detail::ArrivalLine& line = board_.line(rank_, sequence);
        std::uint64_t old = line.word.load(std::memory_order_acquire); // of the reason, if frozen
        if ((old & detail::ArrivalLine::frozen) != 0) {
            throw_failure(board_.reason());
        }
        if (!fits) {
            line.payload[0] = said.count;
            line.payload[1] = reinterpret_cast<std::uintptr_t>(in);
            line.payload[2] = reinterpret_cast<std::uintptr_t>(out);
            board_.progress(sequence).reset(sequence);
        } else if (bytes != 0) {
            std::memcpy(line.payload.data(), in, bytes);
        }
        std::uint64_t const word = detail::ArrivalLine::encode(sequence, said, fits);
        if (!line.word.compare_exchange_strong(old, word)) { // frozen meanwhile
            throw_failure(board_.reason());
        }
        ++next_;
        board_.room.wake();
        return {*this, sequence};
    }

    /// The slot of the next collective is free when every rank has finished what used it before.
    void make_room() {
        constexpr std::uint64_t slots = detail::Board::slots;
        if (next_ < slots + all_retired_) {
            return;
        }
        if (retired_ + slots <= next_) {
            finish(retired_);
        }
        auto const others_have_room = [&] {
            all_retired_ = next_;
            for (int rank = 0; rank < size(); ++rank) {
                all_retired_ = std::min(all_retired_, board_.retired(rank).load());
            }
            return next_ < slots + all_retired_ || board_.is_spent();
        };
        if (!board_.room.wait(others_have_room, deadline_)) {
            abort_for_missing(board_.holding_up(next_), "finish a collective", "posts another one");
        }
        if (board_.is_spent()) {
            throw_failure(board_.reason());
        }
    }

    // -- finishing -------------------------------------------------------------------------------

    [[nodiscard]] bool is_done(std::uint64_t sequence) const noexcept {
        return sequence < retired_ || pending_[sequence % detail::Board::slots].is_done;
    }

    enum class Arrival : std::uint8_t { waiting, complete, never };

    [[nodiscard]] Arrival arrival_of(std::uint64_t sequence) noexcept {
        for (int rank = 0; rank < size(); ++rank) {
            std::uint64_t const word = board_.line(rank, sequence).word.load();
            if ((word & detail::ArrivalLine::sequence_mask) !=
                (sequence & detail::ArrivalLine::sequence_mask)) {
                return (word & detail::ArrivalLine::frozen) != 0 ? Arrival::never
                                                                 : Arrival::waiting;
            }
        }
        return Arrival::complete;
    }

    [[nodiscard]] bool try_finish(std::uint64_t sequence) {
        if (is_done(sequence)) {
            return true;
        }
        switch (arrival_of(sequence)) {
        case Arrival::waiting: return false;
        case Arrival::never: throw_failure(board_.reason());
        case Arrival::complete: break;
        }
        Pending& pending = pending_[sequence % detail::Board::slots];
        detail::require_agreement(board_, sequence, pending.said);
        if (pending.is_inline) {
            detail::combine_lines(board_, sequence, pending.said, pending.out);
        } else if (!detail::run_chunks(board_, sequence, pending.said)) {
            return false;
        }
        pending.is_done = true;
        std::uint64_t retired = retired_;
        while (retired < next_ && pending_[retired % detail::Board::slots].is_done) {
            ++retired;
        }
        if (retired != retired_) {
            retired_ = retired;
            board_.retired(rank_).store(retired);
            board_.room.wake();
        }
        return true;
    }

    void finish(std::uint64_t sequence) {
        if (try_finish(sequence)) {
            return;
        }
        auto const has_arrived = [&] { return arrival_of(sequence) != Arrival::waiting; };
        if (!board_.room.wait(has_arrived, deadline_)) {
            auto const missing = board_.missing(sequence);
            if (!missing.empty()) {
                std::string const said = pending_[sequence % detail::Board::slots].said.text();
                abort_for_missing(missing, "arrive", "waits in " + said);
            }
        }
        detail::Descriptor const& said = pending_[sequence % detail::Board::slots].said;
        while (!try_finish(sequence)) { // all have arrived: the last chunks are being computed
            board_.room.wait(
                [&] { return detail::chunks_are_done(board_, sequence, said); }, deadline_
            );
        }
    }

    void abort_for_missing(
        std::vector<int> const& missing, std::string const& did_not, std::string const& meanwhile
    ) {
        double const seconds = std::chrono::duration<double>(deadline_).count();
        std::string const culprits = detail::ranks_text(missing);
        board_.abort(
            {FailureKind::timed_out,
             missing,
             detail::concat(
                 culprits,
                 " did not ",
                 did_not,
                 " within ",
                 seconds,
                 " s, while rank ",
                 rank_,
                 " ",
                 meanwhile
             )}
        );
    }

    detail::Board& board_;
    int rank_;
    std::chrono::nanoseconds deadline_ = default_deadline;
    std::uint64_t next_ = 0;        ///< sequence number of the next collective
    std::uint64_t retired_ = 0;     ///< all before are finished on this rank
    std::uint64_t all_retired_ = 0; ///< on all ranks, as far as known
    std::array<Pending, detail::Board::slots> pending_{};
};

inline void ThreadWork::wait() {
    comm_->finish(sequence_);
}
inline bool ThreadWork::test() {
    return comm_->try_finish(sequence_);
}

inline ThreadWork::~ThreadWork() {
    if (comm_ == nullptr || comm_->is_done(sequence_)) {
        return;
    }
    try {
        if (std::uncaught_exceptions() > exceptions_) {
            comm_->abort(
                {FailureKind::peer_failed,
                 {comm_->rank()},
                 detail::concat("rank ", comm_->rank(), " failed: an exception left a collective")}
            );
        }
        comm_->finish(sequence_);
    } catch (...) { // NOLINT(bugprone-empty-catch): a destructor has nobody to tell; all are awake
    }
}

/// Runs `body(ThreadCommunicator&)` on `world_size` threads, one rank each, and waits for all.
///
/// If a body throws, the others get PeerFailed from whatever they wait in, and the original
/// exception is rethrown here. A rank that returns while others wait for it is PeerFailed with its
/// number at once. A thread that is stuck in the caller's own code cannot be ended.
/// @throws ContractViolation  world_size is below 1.
template <class F>
void run_threads(int world_size, F body) {
    if (world_size < 1) {
        throw ContractViolation{
            detail::concat("run_threads needs at least one rank, but was given ", world_size)
        };
    }
    detail::Board board{world_size};
    std::vector<std::exception_ptr> errors(static_cast<std::size_t>(world_size));
    std::atomic<int> first_to_throw{-1};
    auto const run = [&](int rank) {
        AbortReason reason{
            FailureKind::peer_failed,
            {rank},
            detail::concat("rank ", rank, " left while others wait for it")
        };
        try {
            ThreadCommunicator comm{board, rank};
            body(comm);
        } catch (...) {
            errors[static_cast<std::size_t>(rank)] = std::current_exception();
            int expected = -1;
            first_to_throw.compare_exchange_strong(expected, rank);
            reason = detail::blamed_on(rank, detail::failure_of(std::current_exception()));
        }
        board.abort(reason);
    };
    {
        std::vector<std::jthread> threads;
        threads.reserve(static_cast<std::size_t>(world_size));
        try {
            for (int rank = 1; rank < world_size; ++rank) {
                threads.emplace_back(run, rank);
            }
        } catch (...) { // the system has no more threads: the started ones must not wait for them
            board.abort({FailureKind::communication, {}, "a thread for a rank could not be started"}
            );
            throw;
        }
        run(0);
    }
    std::optional<int> culprit;
    for (int const named : board.reason().ranks) {
        if (errors[static_cast<std::size_t>(named)]) {
            culprit = named;
            break;
        }
    }
    int const rank = culprit.value_or(first_to_throw.load());
    if (rank >= 0) {
        std::rethrow_exception(errors[static_cast<std::size_t>(rank)]);
    }
}

} // namespace joinable::inline v0
