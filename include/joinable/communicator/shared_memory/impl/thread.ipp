// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/shared_memory/thread.hpp>

#include <utility>

#include <joinable/communicator/shared_memory/group/shared_heap.hpp>

namespace joinable { inline namespace v0 {

JOINABLE_DEFINITION ThreadCommunicator::ThreadCommunicator(
    detail::Group group, int rank, std::shared_ptr<detail::GroupStorage<detail::Heap>> storage
)
    : BoardCommunicator{group, rank, std::move(storage)},
      models_{rank_.storage()->models(), &group.board()} {}

JOINABLE_DEFINITION ThreadCommunicator ThreadCommunicator::split(int color, int key) {
    return {rank_, allot_slot(color, key)};
}

JOINABLE_DEFINITION Arena ThreadCommunicator::share(std::size_t bytes) {
    return detail::share_heap(*this, bytes);
}

JOINABLE_DEFINITION ThreadCommunicator::ThreadCommunicator(
    detail::GroupRank<detail::Heap> const& parent, Slot const& slot
)
    : ThreadCommunicator{slot.group, slot.rank, parent.storage()} {
    set_deadline(parent.deadline());
}

}} // namespace joinable::v0
