// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include <nccl.h>
#include <support/fake_nccl/world.hpp>

/// @file
/// What every call of NCCL does: it is counted, fails where it was told to, and what it starts on a
/// non-blocking communicator is in progress for a while. See README.md.

namespace joinable_tests::fake_nccl {

/// Ends the program: nothing that a test does may come to this.
[[noreturn]] void die(std::string const& text);

/// That which the calling thread stands for, unless it was begun for a call.
std::shared_ptr<Process> const& this_process();
/// Counts a call; not success: what it was told to give.
[[nodiscard]] ncclResult_t begin(char const* function);
/// The same for the process that made a communicator, in whichever of its threads.
[[nodiscard]] ncclResult_t begin(char const* function, Process& process);
[[nodiscard]] bool holds_aborts(Process const& process);
/// The same, and then what `body()` gives.
template <class Body>
[[nodiscard]] ncclResult_t call(char const* function, Body const& body) {
    ncclResult_t const result = begin(function);
    return result == ncclSuccess ? body() : result;
}
/// `result`, of which ncclGetLastError tells `text`.
ncclResult_t refuse(ncclResult_t result, std::string text);

/// @pre mutex() is locked
Member& member_of(ncclComm_t comm, char const* function);
/// A call on a communicator: gives what `body(lock, member)` gives, with mutex() locked.
template <class Body>
[[nodiscard]] ncclResult_t call(ncclComm_t comm, char const* function, Body const& body) {
    return call(function, [&] {
        std::unique_lock lock{mutex()};
        return body(lock, member_of(comm, function));
    });
}

/// Whether a call may begin: else what stands against it. Changes nothing.
[[nodiscard]] ncclResult_t ready(Member const& member);
/// `result` of a call; an error is the state of a non-blocking communicator from now on.
ncclResult_t poison(Member& member, ncclResult_t result);
/// Runs `go_on` until it returns anything but ncclInProgress, and gives that. On a non-blocking
/// communicator it gives success at once, and `go_on` runs where the state is asked for.
[[nodiscard]] ncclResult_t start(
    std::unique_lock<std::mutex>& lock,
    Member& member,
    char const* function,
    std::function<ncclResult_t()> go_on
);
/// `result`, or the state of a non-blocking communicator: what most calls return that start something.
[[nodiscard]] ncclResult_t or_state(Member const& member, ncclResult_t result);
/// Ends the program where a group is open, which puts the call off.
void require_no_group(char const* function);

} // namespace joinable_tests::fake_nccl
