// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
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

/// How run_processes() starts ranks.
struct ProcessOptions {
    /// Starts them although this process has other threads. The body then uses nothing that waits
    /// for one of these, such as OpenMP after its first parallel loop.
    bool other_threads = false;
};

namespace detail {

/// Ends this process without the program's destructors; files are flushed, not closed.
[[noreturn]] void end_process(int status) noexcept;

/// Runs one rank in its new process, until the process exits.
[[noreturn]] void run_rank(
    ProcessSegment& segment, int rank, std::function<void(ProcessCommunicator&)> const& body
) noexcept;

/// The number of threads of this process beside this one; 0 if the system does not tell. A thread
/// that was joined may be listed for a moment: while there are others, it asks again for `patience`.
[[nodiscard]] int count_other_threads(std::chrono::milliseconds patience);

/// Throws the error of the first rank that failed by itself, not because of another. If several
/// did, it is the one that the abort names.
void throw_first_failure(ProcessSegment& segment, ChildProcesses const& children);

/// The part of run_processes() that does not depend on the body's type, so that it is compiled
/// once.
void run_processes_of(
    int world_size,
    std::function<void(ProcessCommunicator&)> const& body,
    ProcessOptions const& options
);

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
    detail::FileHandle file = detail::make_file(bytes);
    Arena memory = file.number() < 0 ? Arena{} : detail::SharedFile::map(std::move(file), bytes);
    if (memory.data() == nullptr) {
        throw CommunicationError{detail::concat(
            "expected ",
            bytes,
            " bytes of shared memory, but the system says: ",
            std::strerror(errno)
        )};
    }
    return {std::move(memory), count};
}

/// Runs `body(ProcessCommunicator&)` in `world_size` new processes, one rank each, and waits for
/// all. The new processes are copies of this one that have only this thread. This process does not
/// see their changes, except in a shared_buffer(). Each ends with its body; destructors of static
/// objects do not run. They are killed if this process dies or this thread ends.
///
/// A rank that waits for a thread that it does not have never returns, and no deadline ends that.
/// OpenMP and libraries of linear algebra keep threads after their first use, so call this before.
/// A process with other threads is refused unless `options` say `{.other_threads = true}`. The
/// thread sanitizer has a thread of its own, so under it nothing is counted.
///
/// Buffered output of C's streams is written before the ranks start, and when a body ends. After
/// `std::ios::sync_with_stdio(false)` std::cout has a buffer of its own, so flush it before the call
/// and at the end of the body; else each rank prints again what it held, and its own text is lost.
///
/// If a body throws or a process dies, the waits of the other ranks throw PeerFailed. Ranks that
/// have not ended after one more deadline, the longest that any of them has set, are killed.
/// @throws PeerFailed          with the number and the text of the rank that failed first.
/// @throws ContractViolation   world_size is below 1, or this process has other threads.
/// @throws CommunicationError  the system has no memory or no processes for the ranks.
template <class F>
void run_processes(int world_size, F body, ProcessOptions options = {}) {
    static_assert(
        std::invocable<F&, ProcessCommunicator&>,
        "run_processes: each rank calls body(ProcessCommunicator&), which this body does not take"
    );
    detail::run_processes_of(world_size, std::ref(body), options);
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

#else

namespace joinable { inline namespace v0 {

/// Explains itself where it is called.
template <class... Given>
void run_processes(Given const&...) {
    static_assert(
        sizeof...(Given) > 100,
        "run_processes: process ranks need Linux: elsewhere use run_threads()"
    );
}

}} // namespace joinable::v0

#endif

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/shared_memory/impl/run_processes.ipp>
#endif
