// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>
#include <cstdint>

#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/shared_memory/board/board.hpp>
#include <joinable/communicator/shared_memory/board/waiting.hpp>
#include <joinable/communicator/shared_memory/engine/chunks.hpp>
#include <joinable/communicator/shared_memory/engine/exchange.hpp>
#include <joinable/communicator/shared_memory/engine/slices.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Computes for a rank beside it, in collectives in which all ranks have arrived. It knows what the
/// board knows: the rank itself is not asked, and finishes its collectives as always.
class Helper {
public:
    Helper(Board& board, int rank) noexcept : board_{board}, rank_{rank} {}

    /// Until stop().
    void run() {
        auto const forever = end_of_wait(SleepThrough{}());
        while (!stops_.load()) {
            board_.helpers_room.sleep([&] { return stops_.load() || help(); }, forever);
        }
    }
    void stop() noexcept {
        stops_.store(true);
        board_.helpers_room.wake();
    }

private:
    /// Computes in the oldest collective in which there is something left. Whether there was one.
    bool help() {
        std::uint64_t const first = board_.retired(rank_).load();
        for (std::uint64_t k = 0; k < Board::max_in_flight; ++k) {
            std::uint64_t const sequence = first + k;
            if (!board_.has_arrived(rank_, sequence)) {
                return false;
            }
            if (have_all_arrived(sequence)) {
                bool const is_still_there = board_.begin_helping(rank_, sequence);
                bool const has_computed = is_still_there && compute(sequence);
                board_.end_computing(rank_, Worker::helper);
                board_.room.wake(); // a rank that waits for the slots
                if (has_computed) {
                    return true;
                }
            }
        }
        return false;
    }

    [[nodiscard]] bool have_all_arrived(std::uint64_t sequence) noexcept {
        for (int rank = 0; rank < board_.size(); ++rank) {
            if (!board_.has_arrived(rank, sequence)) {
                return false;
            }
        }
        return true;
    }

    /// @pre all have arrived, and the slots stay as they are
    bool compute(std::uint64_t sequence) {
        ArrivalLine const& line = board_.line(rank_, sequence);
        Descriptor const said = ArrivalLine::decode(line.word.load(), line.payload);
        if (is_small(said) || disagreement(board_, sequence, said)) {
            return false; // the rank itself tells the others
        }
        if (Pipeline::is_needed(board_, sequence)) {
            return false; // it does not know the rank's own memory
        }
        Cut const cut{Exchange{board_, sequence, said}, size_of(said.dtype), board_.size()};
        bool const has_some = has_unclaimed(board_, sequence, cut);
        if (has_some) {
            run_chunks(board_, sequence, said, cut, rank_, board_.size(), Worker::helper);
        }
        return has_some;
    }

    Board& board_;
    int rank_;
    std::atomic<bool> stops_{false};
};

}}} // namespace joinable::v0::detail
