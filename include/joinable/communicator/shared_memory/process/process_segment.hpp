// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <span>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/shared_memory/board/board.hpp>
#include <joinable/communicator/shared_memory/board/first_reason.hpp>
#include <joinable/communicator/shared_memory/board/group_memory.hpp>
#include <joinable/communicator/shared_memory/board/waiting.hpp>
#include <joinable/communicator/shared_memory/group/group.hpp>
#include <joinable/communicator/shared_memory/group/group_rank.hpp>
#include <joinable/communicator/shared_memory/group/group_storage.hpp>
#include <joinable/config.hpp>
#include <joinable/device/arena.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// How the body of a rank ended, for the process that started it.
struct alignas(64) Outcome {
    enum State : int { running, returned, threw };

    std::atomic<State> state{running};
    std::atomic<std::chrono::nanoseconds::rep> deadline{default_deadline.count()};
    StoredReason reason; ///< of its exception
};

/// The memory that process ranks share: their group, their outcomes, and room for each rank's
/// buffers. It is mapped before the processes are created, so it has one address in all of them. It
/// has no name, so killing any process leaves nothing in /dev/shm.
class ProcessSegment : public Watch, public std::enable_shared_from_this<ProcessSegment> {
public:
    /// @throws ContractViolation   a group cannot have so many ranks.
    /// @throws CommunicationError  there is no memory.
    explicit ProcessSegment(int size);
    virtual ~ProcessSegment() = default;
    ProcessSegment(ProcessSegment const&) = delete;
    ProcessSegment& operator=(ProcessSegment const&) = delete;

    [[nodiscard]] Board& board() const noexcept { return *board_; }
    [[nodiscard]] Group group() noexcept { return Group{*board_, this}; }
    /// Does nothing: the process that started the ranks detects deaths.
    std::chrono::nanoseconds look_for_deaths() noexcept override { return SleepThrough{}(); }
    /// Zeroes memory. Gives whole pages back to the system until they are used again.
    /// @throws CommunicationError  as reserve().
    void clear(std::byte* data, std::size_t bytes);
    [[nodiscard]] Outcome& outcome(int rank) const noexcept;
    /// Where a rank puts data for the others: copies of its buffers, messages, subgroups.
    [[nodiscard]] std::span<std::byte> staging(int rank) const noexcept;

protected:
    static constexpr std::size_t most_room = std::size_t{1} << 36U; // for each rank
    static constexpr std::size_t least_room = std::size_t{1} << 24U;

    /// Uses memory that a derived class has mapped and will unmap.
    /// @pre it starts at a page, has bytes_for(size, room), and is zeroed; one process creates it
    ProcessSegment(int size, std::size_t room, std::byte* memory, bool is_creator);
    /// The parts of that memory that are used from the start. The others need reserve().
    static std::array<BlockPart, 3> parts_at_start(int size);
    /// The offset of staging(), if `room` is 0.
    static std::size_t bytes_for(int size, std::size_t room);

private:
    static constexpr std::size_t tables_end_at = 4096; ///< at a multiple of this, on all systems

    void create(int size);
    static std::size_t width(int size) noexcept { return static_cast<std::size_t>(size); }
    static std::size_t outcomes_at(int size) {
        return (Group::bytes_for(size) + alignof(Outcome) - 1) / alignof(Outcome) *
               alignof(Outcome);
    }
    [[nodiscard]] std::byte* at(std::size_t offset) const noexcept { return memory_ + offset; }

    std::size_t staging_at_;
    std::size_t room_ = 0;
    Arena mapped_; ///< empty: a derived class has mapped the memory
    std::byte* memory_ = nullptr;
    Board* board_ = nullptr;
};

/// One process's part of its group: what its communicator and its works have in common.
class ProcessRank : public GroupRank<Room> {
public:
    ProcessRank(ProcessSegment& segment, int rank);
    /// A rank of a group that was split from the group of all.
    ProcessRank(Group group, int rank, std::shared_ptr<GroupStorage<Room>> storage);

    /// After a failure, the process that started this one waits this long for the others. Only the
    /// deadline of the outermost group counts, and only in the rank's own process.
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) noexcept;

private:
    Outcome* outcome_ = nullptr;
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/shared_memory/process/impl/process_segment.ipp>
#endif
