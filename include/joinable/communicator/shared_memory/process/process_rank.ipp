// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/shared_memory/process/process_rank.hpp>

#include <cstddef>
#include <utility>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION ProcessRank::ProcessRank(ProcessSegment& segment, int rank) : GroupRank{
          segment.group(),
          rank,
          // An arena may outlive this object, so it keeps alive a segment that nothing else owns.
          std::make_shared<GroupStorage<Room>>(
              segment.staging(rank),
              [&segment,
               kept = segment.weak_from_this().lock()](std::byte const* data, std::size_t bytes) {
                  segment.reserve(data, bytes);
              },
              [&segment](std::byte* data, std::size_t bytes) { segment.clear(data, bytes); }
          )
      },
      outcome_{&segment.outcome(rank)} {}

JOINABLE_DEFINITION
ProcessRank::ProcessRank(Group group, int rank, std::shared_ptr<GroupStorage<Room>> storage)
    : GroupRank{group, rank, std::move(storage)} {}

JOINABLE_DEFINITION std::chrono::nanoseconds
ProcessRank::set_deadline(std::chrono::nanoseconds deadline) noexcept {
    if (outcome_ != nullptr) {
        outcome_->deadline.store(deadline.count());
    }
    return GroupRank::set_deadline(deadline);
}

}}} // namespace joinable::v0::detail
