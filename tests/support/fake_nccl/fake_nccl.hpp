// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <string>

#include <nccl.h>

/// @file
/// An NCCL for machines without a GPU, linked in the place of libnccl, over the fake CUDA runtime:
/// the sources beside this header define the functions of <nccl.h> that the library calls. Ranks are threads.
///
/// What it does, beside what NVIDIA's manual says of each function:
/// - A collective runs on its stream when all ranks have come to it, and waits there for ever if one
///   does not, or says something else: as NCCL, which compares nothing.
/// - A non-blocking call is in progress for a while, and goes on only when it is asked: so an event that
///   is recorded too early lies before the collective, not behind it.
/// - A split that is in progress when its communicator is aborted makes a handle all the same, which is
///   good for nothing but to be aborted, too.
/// - Calls on a communicator that is in progress are refused, and put it into an error state.
/// - A handle that was freed, or memory that is not a device's: the program ends with a message.
namespace joinable_tests::fake_nccl {

/// From now on the communicator is in this error state, and says so: as when its network fails.
void fail_async(ncclComm_t comm, ncclResult_t result, std::string text);
/// The calling thread's next call of `function`, by its name, gives this. ncclCommAbort has an effect
/// all the same, but the handle is not freed; other functions do nothing.
void fail_next(std::string function, ncclResult_t result);
/// How often a non-blocking call is in progress when it is asked before it goes on: 1 at start.
void set_polls_in_progress(int polls);
/// What ncclGetVersion gives: the header's at start.
void set_version(int code);

/// Communicators that were not freed.
[[nodiscard]] std::size_t live_communicators();
/// Forgets those that failed to be.
void forget_communicators();
/// How often the calling thread has called a function, by its name.
[[nodiscard]] std::size_t calls(std::string const& function);

} // namespace joinable_tests::fake_nccl
