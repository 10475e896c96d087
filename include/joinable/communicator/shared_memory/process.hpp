// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/shared_memory/board/group_memory.hpp>
#include <joinable/communicator/shared_memory/group/board_communicator.hpp>
#include <joinable/communicator/shared_memory/group/group_work.hpp>
#include <joinable/config.hpp>
#include <joinable/device/arena.hpp>

#if defined(__linux__) // elsewhere there are no process ranks

#include <joinable/communicator/shared_memory/process/process_rank.hpp>

namespace joinable { inline namespace v0 {

/// A collective or a message between process ranks. wait() and test() are those of the class behind
/// it, which all ranks of this machine share.
using ProcessWork = detail::GroupWork<detail::Room>;

namespace detail {

/// Before the bases that use the segment, so that it is there longer.
struct SegmentOwner {
    std::shared_ptr<ProcessSegment> owned; ///< null: it is somebody else's
};

} // namespace detail

/// One rank of a group of unrelated processes, for ProcessCommunicator::attach.
struct AttachOptions {
    int rank = 0;
    int size = 1;
    std::string job; ///< the same on all ranks of the group; no other group has it meanwhile
    std::chrono::nanoseconds deadline = default_deadline; ///< to find each other, and of all waits
};

/// Ranks are processes of this machine, one object in each: made by run_processes(), or started by
/// anybody and attached to each other by a name.
///
/// Collectives are those of ThreadCommunicator, with the same results bit for bit: asynchronous, in
/// rank order, up to 64 in flight, and a rank that computes holds up nobody. More than 2 KiB are
/// copied into memory that the ranks share, and the result is copied back by wait() or test(). So is
/// a message by the side that comes first. Nothing is copied of buffers that lie in an arena of this
/// communicator: the others read and write them where they are. A rank has up to 64 GiB for all that
/// and for the groups that it splits off, less where the system gives less address space; what it has
/// used once is kept until the ranks end, and used again.
///
/// From half a MiB on (2 MiB, where ranks share cores) an all_reduce, reduce or broadcast in which a
/// rank's buffer is in no arena moves in slices, copied in and out while others compute: then every
/// rank copies its slices inside wait() or test() of any collective, and one that computes
/// something else holds up the others.
///
/// A rank that is killed is PeerFailed on all others at once, in every group, wherever it was: with
/// its number in that group, if it was a member. Where ranks have attached they look at each other
/// while they wait; what dies with a rank is then the thread that attached it, so that thread has to
/// stay as long as the communicator and those that were split from it.
///
/// All members that take buffers throw ContractViolation before any data moves when counts or
/// dtypes do not fit, a root is no rank, memory is missing or overlaps, or floats are combined bit
/// by bit. Buffers are the caller's until the work has been waited for; spans of counts are copied.
class ProcessCommunicator : detail::SegmentOwner,
                            public detail::BoardCommunicator<detail::ProcessRank, ProcessWork> {
public:
    /// Meets the other ranks of the job, which call this, too: each in its own process or thread, as
    /// the same user of the same machine. Returns when all have come. Until then the job has a file
    /// in /dev/shm. Afterwards killing any process leaves nothing there. A rank takes some 14 KiB
    /// there at the start, and more when it uses it: 2 KiB for each message below that in flight, a
    /// table for each collective by counts in flight, and what its buffers need. A rank that finds no
    /// room for that throws CommunicationError, and the others PeerFailed; so they do at once if rank 0
    /// finds none at the start.
    /// @throws TimedOut            naming the ranks that had not come at the deadline.
    /// @throws PeerFailed          a rank died meanwhile.
    /// @throws ContractViolation   the rank is none, or another process is that rank already; ranks
    ///                             have different world sizes.
    /// @throws CommunicationError  /dev/shm is full; the job's file there is none that this program
    ///                             can use: damaged, or of another version. Files of other users that
    ///                             have its name are passed by.
    static ProcessCommunicator attach(AttachOptions const& options);

    /// The same for ranks that mpirun, mpiexec, torchrun or srun started; see launch_environment().
    /// @throws ContractViolation  also if that fails, or the ranks are on several machines.
    static ProcessCommunicator
    from_environment(std::chrono::nanoseconds deadline = default_deadline);

    /// For run_processes.
    ProcessCommunicator(detail::ProcessSegment& segment, int rank);

    /// Collective, blocks. The ranks of one `color` (>= 0) form a group, in the order of their
    /// `key`, then of their rank here. It inherits the deadline. An abort of this communicator
    /// reaches it, not the other way round; errors name the ranks of the group in which they occur.
    [[nodiscard]] ProcessCommunicator split(int color, int key);

    /// Local. Zeroed memory that the ranks share, for buffers that are reduced often. Memory of
    /// destroyed arenas is used again. The first arena sets half of the shared memory aside for
    /// arenas. Where that is full, an arena is from the heap, and its buffers are copied as others
    /// are. An arena may outlive the communicator, not the process, and is used and destroyed by one
    /// thread at a time with it. @throws ContractViolation  alignment is no power of two.
    [[nodiscard]] Arena
    allocate(std::size_t bytes, std::size_t alignment = Arena::default_alignment);

    /// Collective, blocks. See shared_buffer().
    [[nodiscard]] Arena share(std::size_t bytes);

private:
    ProcessCommunicator(
        std::shared_ptr<detail::ProcessSegment> segment, AttachOptions const& options
    );
    ProcessCommunicator(ProcessCommunicator const& parent, Slot const& slot);
};

}} // namespace joinable::v0

#endif

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/shared_memory/process.ipp>
#endif

#if defined(__linux__)
namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_INSTANTIATE(class Endpoint<Group, LentBy<Room>>)
JOINABLE_INSTANTIATE(class GroupRank<Room>)
JOINABLE_INSTANTIATE(class GroupWork<Room>)
JOINABLE_INSTANTIATE(class BoardCommunicator<ProcessRank, ProcessWork>)

}}} // namespace joinable::v0::detail

#endif
