// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <functional>
#include <mutex>
#include <string>

#include <nccl.h>
#include <support/fake_nccl/world.hpp>

/// @file
/// What every call of NCCL does: it is counted, fails where it was told to, and on communicators that
/// are non-blocking it is in progress for a while.

namespace joinable_tests::fake_nccl {

/// Ends the program: nothing that a test does may come to this.
[[noreturn]] void die(std::string const& text);

/// Counts a call; not success: what it was told to give.
[[nodiscard]] ncclResult_t begin(char const* function);
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

/// Whether a call may begin: else the error, which stays.
[[nodiscard]] ncclResult_t ready(Member& member);
/// Runs `go_on` until it is done: here, or where a non-blocking communicator is asked.
[[nodiscard]] ncclResult_t
start(std::unique_lock<std::mutex>& lock, Member& member, std::function<bool()> go_on);

} // namespace joinable_tests::fake_nccl
