// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>

#include <joinable/communicator/arena.hpp>
#include <joinable/communicator/detail/board_communicator.hpp>
#include <joinable/communicator/detail/process_rank.hpp>
#include <joinable/communicator/detail/shared_mapping.hpp>
#include <joinable/communicator/process_work.hpp>

#if defined(__linux__) // elsewhere there are no process ranks

namespace joinable::inline v0 {

/// Ranks are processes of this machine: made by run_processes(), one object in each.
///
/// Collectives are those of ThreadCommunicator, with the same results bit for bit: asynchronous, in
/// rank order, up to 64 in flight, and a rank that computes holds up nobody. More than 2 KiB are
/// copied into memory that the ranks share, and the result is copied back by wait() or test(). So is
/// a message by the side that comes first. Nothing is copied of buffers that lie in an arena of this
/// communicator: the others read and write them where they are. A rank has up to 64 GiB for all that
/// and for the groups that it splits off, less where the system gives less address space; what it has
/// used once is kept until the ranks end, and used again.
///
/// A rank that is killed is PeerFailed on all others at once, in every group, wherever it was: with
/// its number in that group, if it was a member.
///
/// All members that take buffers throw ContractViolation before any data moves when counts or
/// dtypes do not fit, a root is no rank, memory is missing or overlaps, or floats are combined bit
/// by bit. Buffers are the caller's until the work has been waited for; spans of counts are copied.
class ProcessCommunicator : public detail::BoardCommunicator<detail::ProcessRank, ProcessWork> {
public:
    /// For run_processes.
    ProcessCommunicator(detail::ProcessSegment& segment, int rank)
        : BoardCommunicator{segment, rank} {}

    /// Collective, blocks. The ranks of one `color` (>= 0) form a group, in the order of their
    /// `key`, then of their rank here. It inherits the deadline. An abort of this communicator
    /// reaches it, not the other way round; errors name the ranks of the group in which they occur.
    [[nodiscard]] ProcessCommunicator split(int color, int key) {
        return {rank_, take_seat(color, key)};
    }

    /// Local. Zeroed memory that the ranks share, for what is to be reduced often; memory of arenas
    /// that are gone is used again. With the first one, half of what is shared is set aside for
    /// arenas; where that is full, an arena is from the heap, and its buffers are copied as others
    /// are. An arena may outlive the communicator, not the process, and is used and destroyed by one
    /// thread at a time with it. @throws ContractViolation  alignment is no power of two.
    [[nodiscard]] Arena
    allocate(std::size_t bytes, std::size_t alignment = Arena::default_alignment) {
        return rank_.allocate(bytes, alignment);
    }

    /// Collective, blocks. See shared_buffer().
    [[nodiscard]] Arena share(std::size_t bytes) { return detail::share_mapping(*this, bytes); }

private:
    ProcessCommunicator(detail::ProcessRank const& parent, Seat const& seat)
        : BoardCommunicator{seat.group, seat.rank, parent.home()} {
        set_deadline(parent.deadline());
    }
};

} // namespace joinable::inline v0

#endif
