// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/work_of.hpp>
#include <joinable/communicator/shared_memory/board/group_memory.hpp>
#include <joinable/communicator/shared_memory/group/board_communicator.hpp>
#include <joinable/communicator/shared_memory/group/group_rank.hpp>
#include <joinable/config.hpp>
#include <joinable/device/arena.hpp>

#if defined(__linux__) // elsewhere there are no process ranks

#include <joinable/communicator/shared_memory/process/process_segment.hpp>

namespace joinable { inline namespace v0 {

/// A collective or a message between process ranks, with wait() and test(). A process that was stopped
/// past the deadline while it wrote to a buffer in an arena may finish that when it goes on. Such an
/// arena, and other memory to which it may write, is never used again.
using ProcessWork = detail::WorkOf<detail::GroupRank<detail::Room>, std::uint64_t, detail::Message>;

namespace detail {

/// The first base, so that the segment outlives the bases that use it.
struct SegmentOwner {
    std::shared_ptr<ProcessSegment> owned; ///< null: another object owns it
};

} // namespace detail

/// Identifies one rank of a group of independent processes, for ProcessCommunicator::attach.
struct AttachOptions {
    int rank = 0;
    int size = 1;
    std::string job; ///< the same on all ranks of the group; unique while the group exists
    std::chrono::nanoseconds deadline = default_deadline; ///< for attach() and all waits
};

/// Ranks are processes of this machine, with one object in each. run_processes() makes them;
/// independently started processes attach to each other by a name.
///
/// Collectives behave like those of ThreadCommunicator and give bitwise identical results. They are
/// asynchronous, combine in rank order, and up to 64 may be in flight. A busy rank delays no other
/// rank. Buffers of more than 2 KiB are copied to memory that the ranks share; wait() or test()
/// copies the result back. The side of a message that arrives first copies it there too. Buffers in
/// an arena of this communicator are not copied: the other ranks read and write them in place. A
/// rank has up to 64 GiB for all of this, including the groups that it splits off, or less if the
/// system gives less address space. Memory that has been used is kept for reuse until the ranks
/// end.
///
/// From 512 KiB on (2 MiB if ranks share cores), an all_reduce, reduce or broadcast moves in slices
/// if any rank's buffer is in no arena. Ranks copy slices in and out while others compute. Every
/// rank copies its own slices inside wait() or test() of any collective or message of this communicator, so a rank
/// that computes something else then delays the others. A wait in a group that was split from it copies
/// none: wait for such a sum before this rank waits in another communicator.
///
/// If a rank is killed, all others get PeerFailed at once, in every group. The error has the killed
/// rank's number in that group, if it was a member. Attached ranks check each other while they
/// wait. Each has a thread that sleeps until its process dies or the communicator is destroyed.
class ProcessCommunicator : detail::SegmentOwner,
                            public detail::BoardCommunicator<detail::ProcessRank, ProcessWork> {
public:
    static constexpr std::string_view transport = "processes";
    /// Whether a launcher started this process and does not say that ranks are on other machines. Local.
    /// @throws ContractViolation  as launch_environment().
    [[nodiscard]] static bool is_launched();

    /// Meets the other ranks of the job. Each rank calls this in its own process or thread, as the
    /// same user of the same machine. Returns when all have arrived. Until then the job has a file
    /// in /dev/shm; afterwards killing any process leaves nothing there. A rank takes about 14 KiB
    /// of /dev/shm at the start and more on use: 2 KiB for each message of up to 2 KiB in flight, a
    /// table for each collective with counts in flight, and the space for its buffers. The same
    /// holds for each rank of a group that is split off. A rank for which there is no space throws
    /// CommunicationError, and the others throw PeerFailed. The same happens at once if rank 0
    /// fails or is killed at the start, also before it has any space.
    /// @throws TimedOut            some ranks, which it names, had not arrived at the deadline.
    /// @throws PeerFailed          a rank died meanwhile.
    /// @throws ContractViolation   the rank is out of range or already taken; ranks have
    ///                             different world sizes.
    /// @throws CommunicationError  /dev/shm is full; the job's file there is damaged, or of another
    ///                             version of this library. Files of other users that have its name
    ///                             are ignored.
    static ProcessCommunicator attach(AttachOptions const& options);

    /// Attaches a rank that mpirun, mpiexec, torchrun or srun started; see launch_environment().
    /// @throws ContractViolation  also if launch_environment() fails, or the ranks are on several
    ///                            machines.
    static ProcessCommunicator
    from_environment(std::chrono::nanoseconds deadline = default_deadline);

    /// For run_processes.
    ProcessCommunicator(detail::ProcessSegment& segment, int rank);

    /// Collective; blocks. The ranks with the same `color` (>= 0) form a group, ordered by `key`,
    /// then by their rank here. The group inherits the deadline. Aborting this communicator aborts
    /// the group, but not the reverse. Errors name ranks by their numbers in the group where they
    /// occur.
    [[nodiscard]] ProcessCommunicator split(int color, int key);

    /// Local. Zeroed memory that the ranks share, for buffers that are reduced often. Memory of
    /// destroyed arenas is reused. The first arena reserves half of the shared memory for arenas.
    /// When that is full, further arenas are on the heap, and their buffers are copied like any
    /// others. An arena may outlive the communicator but not the process. One thread at a time may
    /// use or destroy an arena or its communicator.
    /// @throws ContractViolation  alignment is not a power of two, or this is a process that the rank has
    ///                            forked: the rank may use the same memory.
    [[nodiscard]] Arena
    allocate(std::size_t bytes, std::size_t alignment = Arena::default_alignment);

    /// Collective; blocks. See shared_buffer().
    [[nodiscard]] Arena share(std::size_t bytes);

private:
    ProcessCommunicator(
        std::shared_ptr<detail::ProcessSegment> segment, AttachOptions const& options
    );
    ProcessCommunicator(ProcessCommunicator const& parent, Slot const& slot);
};

}} // namespace joinable::v0

#else

namespace joinable { inline namespace v0 {

/// Explains itself where it is used.
class [[gnu::unavailable("process ranks need Linux: elsewhere use run_threads()"
)]] ProcessCommunicator;

}} // namespace joinable::v0

#endif

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/shared_memory/impl/process.ipp>
#endif

#if defined(__linux__)
namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_INSTANTIATE(class Endpoint<Group, LentBy<Room>>)
JOINABLE_INSTANTIATE(class GroupRank<Room>)
JOINABLE_INSTANTIATE(class WorkOf<GroupRank<Room>, std::uint64_t, Message>)
JOINABLE_INSTANTIATE(class BoardCommunicator<ProcessRank, ProcessWork>)

}}} // namespace joinable::v0::detail

#endif
