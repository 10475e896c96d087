// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/shared_memory/process.hpp>

#if defined(__linux__)

#include <utility>

#include <joinable/communicator/detail/shared_mapping.hpp>
#include <joinable/communicator/environment.hpp>
#include <joinable/communicator/shared_memory/process/named_segment.hpp>

namespace joinable { inline namespace v0 {

JOINABLE_DEFINITION ProcessCommunicator ProcessCommunicator::attach(AttachOptions const& options) {
    return ProcessCommunicator{
        detail::NamedSegment::attach(options.rank, options.size, options.job, options.deadline),
        options
    };
}

JOINABLE_DEFINITION ProcessCommunicator
ProcessCommunicator::from_environment(std::chrono::nanoseconds deadline) {
    LaunchEnvironment const launch = launch_environment();
    if (!launch.spread.empty()) {
        throw ContractViolation{detail::concat(
            "expected all ranks on this machine, as they share its memory, but ",
            launch.spread,
            ": start them on one machine, or use a communicator that has a network"
        )};
    }
    return attach({launch.rank, launch.size, launch.job, deadline});
}

JOINABLE_DEFINITION bool ProcessCommunicator::is_launched() {
    return detail::own_environment().launcher() != nullptr && launch_environment().spread.empty();
}

JOINABLE_DEFINITION
ProcessCommunicator::ProcessCommunicator(detail::ProcessSegment& segment, int rank)
    : SegmentOwner{}, BoardCommunicator{segment, rank} {}

JOINABLE_DEFINITION ProcessCommunicator ProcessCommunicator::split(int color, int key) {
    return {*this, allot_slot(color, key)};
}

JOINABLE_DEFINITION Arena ProcessCommunicator::allocate(std::size_t bytes, std::size_t alignment) {
    return rank_here().memory().allocate(bytes, alignment);
}

JOINABLE_DEFINITION Arena ProcessCommunicator::share(std::size_t bytes) {
    return detail::share_mapping(*this, bytes);
}

JOINABLE_DEFINITION ProcessCommunicator::ProcessCommunicator(
    std::shared_ptr<detail::ProcessSegment> segment, AttachOptions const& options
)
    : SegmentOwner{std::move(segment)}, BoardCommunicator{*owned, options.rank} {
    set_deadline(options.deadline);
}

JOINABLE_DEFINITION
ProcessCommunicator::ProcessCommunicator(ProcessCommunicator const& parent, Slot const& slot)
    : SegmentOwner{parent}, BoardCommunicator{slot.group, slot.rank, parent.rank_.storage()} {
    set_deadline(parent.rank_.deadline());
}

}} // namespace joinable::v0

#endif
