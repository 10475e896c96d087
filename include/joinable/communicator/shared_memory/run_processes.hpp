// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstddef>
#include <functional>
#include <type_traits>
#include <utility>

#include <joinable/communicator/shared_buffer.hpp>
#include <joinable/communicator/shared_memory/process.hpp>
#include <joinable/config.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

#if defined(__linux__) // elsewhere there are no process ranks

#include <joinable/communicator/detail/shared_mapping.hpp>
#include <joinable/communicator/shared_memory/process/child_processes.hpp>
#include <joinable/communicator/shared_memory/process/process_segment.hpp>

#include <cerrno>
#include <cstring>

namespace joinable { inline namespace v0 {

namespace detail {

/// Runs one rank in its new process, until the process exits.
[[noreturn]] void run_rank(
    ProcessSegment& segment, int rank, std::function<void(ProcessCommunicator&)> const& body
) noexcept;

/// Throws the error of the first rank that failed by itself, not because of another. If several
/// did, it is the one that the abort names.
void throw_first_failure(ProcessSegment& segment, ChildProcesses const& children);

/// The part of run_processes() that does not depend on the body's type, so that it is compiled
/// once.
void run_processes_of(int world_size, std::function<void(ProcessCommunicator&)> const& body);

} // namespace detail

/// Makes `count` zeroed elements that this process shares with processes that it creates later. Use
/// it to return results from run_processes(). Local; no rank calls it. The result may not be
/// copyable, so a body refers to it.
///
/// @code
/// auto const losses = joinable::shared_buffer<double>(4);
/// joinable::run_processes(4, [&](auto& comm) { losses[comm.rank()] = train(comm); });
/// @endcode
/// @throws CommunicationError  the system cannot provide the memory.
template <class T>
[[nodiscard]] SharedBuffer<T> shared_buffer(std::size_t count) {
    detail::check_shared_element<T>();
    std::size_t const bytes = detail::bytes_of_elements<T>(count);
    if (count == 0) {
        return {};
    }
    Arena memory = detail::map_shared(bytes);
    if (memory.data() == nullptr) {
        throw CommunicationError{detail::concat(
            "expected ", bytes, " bytes of shared memory, but mmap says: ", std::strerror(errno)
        )};
    }
    return {std::move(memory), count};
}

/// Runs `body(ProcessCommunicator&)` in `world_size` new processes, one rank each, and waits for
/// all. The new processes are copies of this one that have only this thread. This process does not
/// see their changes, except in a shared_buffer(). Each ends with its body; destructors of static
/// objects do not run. They are killed if this process dies or this thread ends.
///
/// If a body throws or a process dies, the waits of the other ranks throw PeerFailed. Ranks that
/// have not ended after one more deadline, the longest that any of them has set, are killed.
/// @throws PeerFailed          with the number and the text of the rank that failed first.
/// @throws ContractViolation   world_size is below 1.
/// @throws CommunicationError  the system has no memory or no processes for the ranks.
template <class F>
void run_processes(int world_size, F body) {
    static_assert(
        std::invocable<F&, ProcessCommunicator&>,
        "run_processes: each rank calls body(ProcessCommunicator&), which this body does not take"
    );
    detail::run_processes_of(world_size, std::ref(body));
}

/// Explains what is missing.
template <class F>
void run_processes(F const&) {
    static_assert(
        std::is_void_v<F>,
        "run_processes: the number of ranks comes first, as in run_processes(4, [](joinable::ProcessCommunicator& comm) "
        "{ ... })"
    );
}
/// Explains arguments in another order.
template <class F>
    requires(!std::convertible_to<F, int>)
void run_processes(F const&, int) {
    static_assert(
        std::convertible_to<F, int>,
        "run_processes: the number of ranks comes first, as in run_processes(4, body)"
    );
}

}} // namespace joinable::v0

#endif

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/shared_memory/run_processes.ipp>
#endif
