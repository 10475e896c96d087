// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/bucket/broadcast_coalesced.hpp>
#include <joinable/bucket/reducer.hpp>
#include <joinable/communicator/control.hpp>
#include <joinable/communicator/shared_memory/process.hpp>
#include <joinable/communicator/shared_memory/thread.hpp>
#include <joinable/config.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/detail/module_state.hpp>
#include <joinable/participant/gradient_participant.hpp>

// Models over ranks of one machine, with defaults. A program that compiles the library once compiles these classes
// there as well.

namespace joinable { inline namespace v0 {

JOINABLE_INSTANTIATE(class detail::ControlOver<ThreadCommunicator&>)
JOINABLE_INSTANTIATE(void detail::CoalescedBroadcast::run(ThreadCommunicator&, int))
JOINABLE_INSTANTIATE(class detail::ModuleState<ThreadCommunicator>)
JOINABLE_INSTANTIATE(class Reducer<ThreadCommunicator>)
JOINABLE_INSTANTIATE(class GradientParticipant<ThreadCommunicator, Reducer<ThreadCommunicator>>)
JOINABLE_INSTANTIATE(class DistributedDataParallel<ThreadCommunicator>)

#if defined(__linux__) // elsewhere there are no process ranks
JOINABLE_INSTANTIATE(class detail::ControlOver<ProcessCommunicator&>)
JOINABLE_INSTANTIATE(void detail::CoalescedBroadcast::run(ProcessCommunicator&, int))
JOINABLE_INSTANTIATE(class detail::ModuleState<ProcessCommunicator>)
JOINABLE_INSTANTIATE(class Reducer<ProcessCommunicator>)
JOINABLE_INSTANTIATE(class GradientParticipant<ProcessCommunicator, Reducer<ProcessCommunicator>>)
JOINABLE_INSTANTIATE(class DistributedDataParallel<ProcessCommunicator>)
#endif

}} // namespace joinable::v0
