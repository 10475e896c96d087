// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <string>

#include <nccl.h>

/// @file
/// An NCCL for machines without a GPU, linked in the place of libnccl, over the fake CUDA runtime:
/// the sources beside this header define the functions of <nccl.h> that the library calls. Ranks are threads.
///
/// What each call returns, when it is asynchronous and what it leaves after a failure is that of NCCL
/// 2.28.9's source: see the table in README.md. Beside that:
/// - A collective runs on its stream when all ranks have come to it, and waits there for ever if one
///   does not, or says something else: as NCCL, which compares nothing.
/// - What a non-blocking communicator is given is in progress for a while, and goes on only when it is
///   asked: so an event that is recorded too early lies before the collective, not behind it.
/// - What is undefined ends the program with a message: a handle that was freed, memory that is not a
///   device's, ncclCommDestroy of a communicator that is not ready, and the like.
namespace joinable_tests::fake_nccl {

/// From now on the communicator's network is in this error state, and says so.
void fail_async(ncclComm_t comm, ncclResult_t result, std::string text);
/// The calling thread's next call of `function`, by its name, gives this. What frees a communicator may be
/// called by another thread. ncclCommAbort has an effect
/// all the same, but the handle is not freed; other functions do nothing.
void fail_next(std::string function, ncclResult_t result);
/// What the calling thread's next call of `function` starts fails with this: on a non-blocking
/// communicator the call succeeds, and the state tells it. A collective in a group: "ncclGroupEnd".
void fail_later(std::string function, ncclResult_t result);
/// What the environment variable NCCL_COMM_BLOCKING says of communicators from now on: 0 or 1, which
/// wins over their configuration, or -1, nothing, as at start.
void force_blocking(int value);
/// How often a non-blocking call is in progress when it is asked before it goes on: 1 at start.
void set_polls_in_progress(int polls);
/// What ncclGetVersion gives: the header's at start.
void set_version(int code);

/// From now on ncclCommAbort ends the kernels of the calling thread's communicators, but returns only
/// when this is false: as where it frees memory of a device that is busy with other work. A split or a
/// registration that it ends writes its result only then, too, as NCCL's thread does when the abort waits for it.
void hold_aborts(bool holds);
/// Waits until the aborts that are not held have returned.
void wait_for_aborts();

/// Communicators that were not freed.
[[nodiscard]] std::size_t live_communicators();
/// Forgets those that failed to be.
void forget_communicators();
/// How often the calling thread has called a function, by its name. What frees a communicator counts for
/// the thread that has made it.
[[nodiscard]] std::size_t calls(std::string const& function);

} // namespace joinable_tests::fake_nccl
