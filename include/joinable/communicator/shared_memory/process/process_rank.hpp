// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <memory>

#include <joinable/communicator/shared_memory/board/group_memory.hpp>
#include <joinable/communicator/shared_memory/group/group.hpp>
#include <joinable/communicator/shared_memory/group/group_rank.hpp>
#include <joinable/communicator/shared_memory/group/group_storage.hpp>
#include <joinable/communicator/shared_memory/process/process_segment.hpp>
#include <joinable/config.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// One process's part of its group: what its communicator and its works have in common.
class ProcessRank : public GroupRank<Room> {
public:
    ProcessRank(ProcessSegment& segment, int rank);
    /// A rank of a group that was split from the group of all.
    ProcessRank(Group group, int rank, std::shared_ptr<GroupStorage<Room>> storage);

    /// After a failure, the process that started this one waits this long for the others. Only the
    /// deadline of the outermost group counts.
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) noexcept;

private:
    Outcome* outcome_ = nullptr;
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/shared_memory/process/process_rank.ipp>
#endif
