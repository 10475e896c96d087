// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>
#include <cstdint>

#include <joinable/communicator/shared_memory/board/board.hpp>
#include <joinable/config.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Computes for a rank, in parallel with it, in collectives in which all ranks have arrived. It
/// reads only the board. The rank does not know of it, and finishes its collectives as usual.
class Helper {
public:
    Helper(Board& board, int rank) noexcept : board_{board}, rank_{rank} {}

    /// Runs until stop().
    void run();
    void stop() noexcept {
        stops_.store(true);
        board_.helpers_room.wake();
    }

private:
    /// Computes in the oldest collective that has work left. Returns whether there was one.
    bool help();

    [[nodiscard]] bool have_all_arrived(std::uint64_t sequence) noexcept;

    /// @pre all ranks have arrived, and the slots do not change
    bool compute(std::uint64_t sequence);

    Board& board_;
    int rank_;
    std::atomic<bool> stops_{false};
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/shared_memory/engine/impl/helper.ipp>
#endif
