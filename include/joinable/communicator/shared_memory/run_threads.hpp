// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <exception>
#include <functional>
#include <type_traits>
#include <vector>

#include <joinable/communicator/shared_memory/thread.hpp>
#include <joinable/config.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

bool is_of_a_peer(std::exception_ptr const& error);

/// The first exception that a rank's body threw by itself, not because another rank failed. `named`
/// are the ranks that the abort names.
std::exception_ptr
original(std::vector<std::exception_ptr> const& errors, std::vector<int> const& named, int first);

/// The part of run_threads() that does not depend on the body's type, so that it is compiled once.
void run_threads_of(int world_size, std::function<void(ThreadCommunicator&)> const& body);

} // namespace detail

/// Runs `body(ThreadCommunicator&)` on `world_size` threads, one rank each, and waits for all.
///
/// If a body throws, the waits of the other ranks throw PeerFailed, and this function rethrows the
/// original exception. If a rank returns while others wait for it, they throw PeerFailed with its
/// number at once. A thread that blocks in the caller's own code cannot be ended.
/// @throws ContractViolation  world_size is below 1.
template <class F>
void run_threads(int world_size, F body) {
    static_assert(
        std::invocable<F&, ThreadCommunicator&>,
        "run_threads: each rank calls body(ThreadCommunicator&), which this body does not take"
    );
    detail::run_threads_of(world_size, std::ref(body));
}

/// Explains what is missing.
template <class F>
void run_threads(F const&) {
    static_assert(
        std::is_void_v<F>,
        "run_threads: the number of ranks comes first, as in run_threads(4, [](joinable::ThreadCommunicator& comm) "
        "{ ... })"
    );
}
/// Explains arguments in another order.
template <class F>
    requires(!std::convertible_to<F, int>)
void run_threads(F const&, int) {
    static_assert(
        std::convertible_to<F, int>,
        "run_threads: the number of ranks comes first, as in run_threads(4, body)"
    );
}

}} // namespace joinable::v0

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/shared_memory/impl/run_threads.ipp>
#endif
