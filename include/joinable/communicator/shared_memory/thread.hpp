// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <memory>

#include <joinable/communicator/shared_memory/board/group_memory.hpp>
#include <joinable/communicator/shared_memory/group/board_communicator.hpp>
#include <joinable/communicator/shared_memory/group/group.hpp>
#include <joinable/communicator/shared_memory/group/group_rank.hpp>
#include <joinable/communicator/shared_memory/group/group_storage.hpp>
#include <joinable/communicator/shared_memory/group/group_work.hpp>
#include <joinable/config.hpp>
#include <joinable/device/arena.hpp>

namespace joinable { inline namespace v0 {

/// A collective or a message between thread ranks. wait() and test() are those of the class behind
/// it, which all ranks of this machine share.
using ThreadWork = detail::GroupWork<detail::Heap>;

/// Ranks are threads of this process: made by run_threads(), one object per rank.
///
/// Reductions combine every element in rank order, so results are the same bit for bit in whatever
/// order ranks arrive. Products of a scaled sum are rounded before they are added, those of 16-bit
/// numbers to float. Everything is asynchronous: a rank that waits or tests does the work for all,
/// so a rank that computes holds up nobody. Up to 64 collectives are in flight, further ones finish
/// the oldest. Ranks compare what they are about to do in every collective. No allocation, no lock
/// and no system call in a collective unless a rank waits long.
///
/// All members that take buffers throw ContractViolation before any data moves when counts or
/// dtypes do not fit, a root is no rank, memory is missing or overlaps, or floats are combined bit
/// by bit. Buffers are the caller's until the work has been waited for; spans of counts are copied.
class ThreadCommunicator
    : public detail::BoardCommunicator<detail::GroupRank<detail::Heap>, ThreadWork> {
public:
    /// For run_threads.
    ThreadCommunicator(
        detail::Group group, int rank, std::shared_ptr<detail::GroupStorage<detail::Heap>> storage
    );

    /// Collective, blocks. The ranks of one `color` (>= 0) form a group, in the order of their
    /// `key`, then of their rank here. It inherits the deadline. An abort of this communicator
    /// reaches it, not the other way round; errors name the ranks of the group in which they occur.
    [[nodiscard]] ThreadCommunicator split(int color, int key);

    /// Collective, blocks. See shared_buffer().
    [[nodiscard]] Arena share(std::size_t bytes);

private:
    ThreadCommunicator(detail::GroupRank<detail::Heap> const& parent, Slot const& slot);
};

}} // namespace joinable::v0

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/shared_memory/thread.ipp>
#endif

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_INSTANTIATE(class Endpoint<Group, LentBy<Heap>>)
JOINABLE_INSTANTIATE(class GroupRank<Heap>)
JOINABLE_INSTANTIATE(class GroupWork<Heap>)
JOINABLE_INSTANTIATE(class BoardCommunicator<GroupRank<Heap>, ThreadWork>)

}}} // namespace joinable::v0::detail
