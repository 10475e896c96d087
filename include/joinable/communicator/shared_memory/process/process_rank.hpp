// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <utility>

#include <joinable/communicator/shared_memory/board/group_memory.hpp>
#include <joinable/communicator/shared_memory/group/group.hpp>
#include <joinable/communicator/shared_memory/group/group_rank.hpp>
#include <joinable/communicator/shared_memory/group/group_storage.hpp>
#include <joinable/communicator/shared_memory/process/process_segment.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// What one process has of its group: what its communicator and its works have in common.
class ProcessRank : public GroupRank<Room> {
public:
    ProcessRank(ProcessSegment& segment, int rank)
        : GroupRank{
              segment.group(),
              rank,
              // An arena may outlive this, so it keeps a segment that nobody else does.
              std::make_shared<GroupStorage<Room>>(
                  segment.staging(rank),
                  [&segment,
                   kept = segment.weak_from_this().lock()](std::byte const* data, std::size_t bytes) {
                      segment.reserve(data, bytes);
                  }
              )
          },
          outcome_{&segment.outcome(rank)} {}
    /// Of a group that was split from that of all.
    ProcessRank(Group group, int rank, std::shared_ptr<GroupStorage<Room>> storage)
        : GroupRank{group, rank, std::move(storage)} {}

    /// The process that started this one waits as long for the others after a failure: what is set
    /// for the group of all counts.
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) noexcept {
        if (outcome_ != nullptr) {
            outcome_->deadline.store(deadline.count());
        }
        return GroupRank::set_deadline(deadline);
    }

private:
    Outcome* outcome_ = nullptr;
};

}}} // namespace joinable::v0::detail
