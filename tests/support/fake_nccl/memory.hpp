// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include <nccl.h>

/// @file
/// Memory of the fake NCCL and its registration. Beside what fake_nccl.hpp says:
/// - Windows are registered together: a rank waits until all have come, with as many bytes.
/// - In a collective, ranks give the same offset in the same window, or all give none: else the
///   program ends with a message.
/// - So it does when memory is freed that is registered, or was freed; when a handle is destroyed that
///   has windows (an abort ends them), or a window goes while collectives are under way.
namespace joinable_tests::fake_nccl {

/// Of ncclMemAlloc, not freed.
[[nodiscard]] std::size_t live_memory();
/// Windows and registrations, of all ranks.
[[nodiscard]] std::size_t live_registrations();
/// Whether the calling thread's windows are something: else they are null, as on systems without
/// symmetric memory. True at start.
void set_windows(bool has);
/// Collectives of the calling process so far whose buffers were in windows.
[[nodiscard]] std::size_t registered_collectives();

// -- between fake_nccl.cpp and fake_memory.cpp -------------------------------------------------------

struct Caller {
    void const* world;
    int rank;
    int size;
    bool is_busy; ///< collectives are under way
};
/// What a rank of a collective reads and writes.
struct Place {
    int rank;
    void const* in;
    void const* out;
};

// Of fake_nccl.cpp.
[[noreturn]] void die(std::string const& text);
/// Counts a call; not success: what it was told to give.
[[nodiscard]] ncclResult_t begin_call(char const* function);
/// Runs `go_on(caller)` until it returns true: in the call, or when a non-blocking handle is asked.
[[nodiscard]] ncclResult_t
start_call(ncclComm_t comm, char const* function, std::function<bool(Caller const&)> go_on);
/// @pre no call is in progress
[[nodiscard]] Caller caller(ncclComm_t comm, char const* function);

// Of fake_memory.cpp.
void check_places(void const* world, std::vector<Place> const& places);
/// The handle is freed. `is_aborted`: with its windows.
void end_member(void const* world, int rank, bool is_aborted);

} // namespace joinable_tests::fake_nccl
